"""The adapter for serving engines, and the examples that use it as the engines would."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import Launched, Ranks, spy_on_launches
from programs import ROOT, TORCHRUN, python

import tunedcomm

WORLD_SIZE = 2
launched: list[Launched] = []
RANKS = Ranks(setup=lambda rank: spy_on_launches(launched))


def test_it_serves_what_a_kernel_is_chosen_for(rank: int) -> None:
    adapter = tunedcomm.ServingAllReduce()
    assert (adapter.rank, adapter.world_size, adapter.disabled) == (rank, WORLD_SIZE, False)
    x = torch.full((32,), rank + 1.0)
    assert not adapter.should_use(x), "nothing is tuned"
    assert adapter.custom_all_reduce(x) is None
    with tunedcomm.force("all_reduce", "one_shot"), adapter.capture():
        assert adapter.should_use(x)
        launched.clear()
        out = adapter.custom_all_reduce(x)
        assert out is not None
        given = torch.empty(32)
        assert adapter.all_reduce(x, given) is given
        assert adapter.all_reduce(x, out=given) is given
        assert [seen.variant for seen in launched] == ["one_shot"] * 3
        for result in (out, given):
            assert torch.equal(result, torch.full((32,), 3.0))
        assert torch.equal(x, torch.full((32,), rank + 1.0))
    assert not adapter.should_use(x)
    assert {told.served_by.split("(")[0] for told in adapter.asked()} == {"", "one_shot"}


def test_names_of_the_engines(rank: int) -> None:
    adapter = tunedcomm.ServingAllReduce(dist.group.WORLD, torch.device("cpu"), max_bytes=64)
    small, large = torch.ones(16), torch.ones(17)
    with tunedcomm.force("all_reduce", "lamport"):
        for ask in (
            adapter.should_use,
            adapter.should_custom_ar,
            adapter.should_use_symm_mem,
            adapter.should_torch_symm_mem_allreduce,
        ):
            assert ask(small)
            assert not ask(large)
        adapter.close()
        assert adapter.disabled
        assert not adapter.should_use(small)


def test_what_it_does_not_take(rank: int) -> None:
    adapter = tunedcomm.ServingAllReduce()
    for x in (torch.ones(4, dtype=torch.bool), torch.ones(0), torch.ones(4, dtype=torch.float64)):
        assert not adapter.should_use(x)
    with pytest.raises(tunedcomm.UnsupportedInputError):
        adapter.all_reduce(torch.ones(4), out=torch.ones(5))
    assert not tunedcomm.ServingAllReduce(device="cpu").should_use(torch.ones(4, dtype=torch.bool))
    for wrong in ("1MiB", -1, 1.5, True):
        with pytest.raises(tunedcomm.UnsupportedInputError, match=f"max_bytes={wrong!r} is not a number of bytes"):
            tunedcomm.ServingAllReduce(max_bytes=wrong)  # type: ignore[arg-type]


EXAMPLES = {
    "vllm_all_reduce.py": ("lamport(", "1 by the library"),
    "sglang_all_reduce.py": ("1024 elements: tunedcomm", "16384 elements: the library"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name: str, tmp_path: Path) -> None:
    variables = {"OMP_NUM_THREADS": "1", "TUNEDCOMM_WORKSPACE_MIB": "1", "GLOO_SOCKET_IFNAME": "lo"}
    variables |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = python(*TORCHRUN, WORLD_SIZE, ROOT / "examples" / name, cwd=tmp_path, timeout=120, **variables)
    for text in EXAMPLES[name]:
        assert text in done.stdout, done.stdout
