"""What a sweep is: problems, also of open models, settings and gangs from what was asked for and the machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from programs import python
from spec_samples import spec_with

from tunedcomm import hardware, kernels
from tunedcomm.cli import options
from tunedcomm.cli.models import Model, Shard, catalog, find_model, shapes_for
from tunedcomm.cli.options import backend_or_default, local_ranks
from tunedcomm.errors import TuningError, UnknownNameError, UnsupportedInputError
from tunedcomm.spec import ITEMSIZE, Problem, get_op, ops
from tunedcomm.tuner import machine
from tunedcomm.tuner.gang.process import gang_environment
from tunedcomm.tuner.gang.protocol import Settings
from tunedcomm.tuner.machine import gang_devices, machine_settings
from tunedcomm.tuner.search.spec import SweepSpec, problems_of

PROBLEM = Problem(op="all_reduce", shape=(512,), dtype="bfloat16", world_size=2, mode="eager")
SETTINGS = Settings(backend="host", world_size=2, trials=8)


def test_host_defaults_are_small_and_eager() -> None:
    kernels.discover()
    settings = machine_settings("host", 2)
    problems = problems_of(SweepSpec(op="all_reduce", settings=settings))
    assert {(problem.mode, problem.world_size) for problem in problems} == {("eager", 2)}
    assert settings.backend == "host"
    assert len(problems) * settings.trials <= 60  # about a second each


def test_product_of_options() -> None:
    kernels.discover()
    product = {"shapes": ((64,), (128,)), "dtypes": ("bfloat16", "float16"), "modes": ("graph", "eager")}
    problems = problems_of(SweepSpec(op="all_reduce", settings=machine_settings("host", 3), **product))
    assert len(set(problems)) == 8
    assert {problem.world_size for problem in problems} == {3}


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"op": "all_reduec"}, UnknownNameError, "'all_reduce'"),
        ({"variants": ("lamprot",)}, UnknownNameError, "'lamport'"),
        ({"reductions": ("xor",)}, ValueError, "no reduction 'xor'; allowed: sum"),
        ({"dtypes": ("int8",)}, ValueError, "no dtype 'int8'"),
        ({"shapes": ((4, 4),)}, ValueError, "does not fit all_reduce"),
        ({"problems": (replace(PROBLEM, world_size=3),)}, TuningError, "one world size"),
        ({"problems": (replace(PROBLEM, reduction="xor"),)}, ValueError, "no reduction 'xor'"),
    ],
)
def test_bad_sweeps_are_refused_with_what_is_allowed(
    changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    kernels.discover()
    with pytest.raises(error, match=text):
        problems_of(spec_with(SweepSpec, SETTINGS, **{"op": "all_reduce", **changes}))


@pytest.mark.parametrize(
    ("machine", "text"),
    [(("cuda", 64), "at most 0 fit"), (("host", 2, 0), "at least 1 gang, got 0")],
)
def test_gangs_that_do_not_fit_are_refused(machine: Any, text: str) -> None:
    with pytest.raises(TuningError, match=text):
        machine_settings(*machine)


def test_auto_fills_the_machine_with_gangs(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus, world_size, asked, expected in ((4, 2, None, 2), (4, 4, None, 1), (8, 3, None, 2), (8, 2, 3, 3)):
        monkeypatch.setattr(hardware, "num_gpu_ranks", lambda gpus=gpus: gpus)
        settings = machine_settings(backend_or_default(), world_size, asked)
        assert (settings.backend, settings.gangs) == ("cuda", expected)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["0,1", "2,3"]),
        ("", ["0,1", "2,3"]),
        ("3, 1,7,5", ["3,1", "7,5"]),
        ("GPU-a,GPU-b,GPU-c,GPU-d,GPU-e", ["GPU-a,GPU-b", "GPU-c,GPU-d"]),
    ],
)
def test_gangs_share_out_the_gpus_that_are_visible(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: list[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    settings = replace(SETTINGS, backend="cuda", gangs=2)
    assert gang_devices(settings) == expected
    assert [gang_environment(settings, devices)["CUDA_VISIBLE_DEVICES"] for devices in expected] == expected
    assert gang_devices(replace(settings, backend="host")) == ["", ""]


def test_one_gang_shares_the_only_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "num_gpu_ranks", lambda: 8)
    for module in (machine, options):
        monkeypatch.setattr(module, "ranks_share_a_gpu", lambda: True)
    found = [machine_settings(backend_or_default(), local_ranks(ranks)) for ranks in (None, 4)]
    assert [(each.backend, each.world_size, each.gangs) for each in found] == [("cuda", 2, 1), ("cuda", 4, 1)]
    with pytest.raises(TuningError, match="at most 1 fit"):
        machine_settings("cuda", 2, 2)
    for visible, expected in (("", "0"), ("5", "5")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert gang_devices(found[0]) == [expected]


# Sizes of open models

kernels.discover()
SHAPED = [spec for spec in ops().values() if spec.model_shapes is not None]


def shapes(model: Model, tp: int) -> dict[str, tuple[int, int]]:
    shard = Shard(model, tp, 1)
    return {part.name: (part.n, part.k) for part in (*shard.column_parallel, *shard.row_parallel)}


@pytest.mark.parametrize("model", catalog().values(), ids=lambda model: model.name)
def test_every_entry_is_complete_and_has_its_sources(model: Model) -> None:
    assert model.source.published.endswith(": config.json")
    assert len(set(model.source.read)) >= 2
    assert all("://" not in text and ": " in text for text in (model.source.published, *model.source.read))
    assert model.dtype in ITEMSIZE
    assert model.hidden_size % 64 == 0
    for tp in (2, 4, 8):
        for op in SHAPED:
            if model.experts is not None or not op.name.startswith("ep_"):
                assert shapes_for([model], tp, [1, 8], op), (tp, op)


def test_matrices_on_4_ranks() -> None:
    # 64 heads of 128 and 8 of keys and values: 16 and 2 a rank; 28672 columns of the MLP: 7168 a rank.
    dense = {"qkv": ((16 + 2 + 2) * 128, 8192), "gate_up": (14336, 8192), "o": (8192, 2048), "down": (8192, 7168)}
    assert shapes(find_model("llama3-70b"), 4) == dense
    # Latent attention is split where it expands.
    assert shapes(find_model("deepseek-v3"), 4) == {
        "q_b": (32 * (128 + 64), 1536),
        "kv_b": (32 * (128 + 128), 512),
        "gate_up": (9216, 7168),
        "shared_gate_up": (1024, 7168),
        "o": (7168, 32 * 128),
        "down": (7168, 4608),
        "shared_down": (7168, 512),
    }


@pytest.mark.parametrize(
    ("models", "tp", "tokens", "op", "expected"),
    [
        ("llama3-70b", 4, [4096], "gemm_rs", [(4096, 8192, 2048), (4096, 8192, 7168)]),
        ("llama3-70b", 4, [4096], "ag_gemm", [(4096, 2560, 8192), (4096, 14336, 8192)]),
        # Hidden states, each size once: two tokens of the one are one of the other.
        ("llama3-8b", 4, [8, 1, 8], "all_reduce", [(4096,), (32768,)]),
        ("llama3-8b qwen3-8b", 4, [1], "all_reduce", [(4096,)]),
        ("llama3-8b llama3-70b", 4, [1, 2], "all_reduce", [(4096,), (8192,), (16384,)]),
        # Each rank is left its tokens.
        ("llama3-8b", 4, [1, 4, 6, 64], "reduce_scatter", [(4096,), (2 * 4096,), (16 * 4096,)]),
        ("llama3-8b", 8, [64], "reduce_scatter", [(8 * 4096,)]),
        # Every rank sends its tokens to the experts.
        ("deepseek-v3 llama3-8b", 4, [1, 256], "ep_dispatch", [(1, 7168, 8, 256), (64, 7168, 8, 256)]),
        ("deepseek-v3 llama3-8b", 4, [1, 256], "ep_combine", [(1, 7168, 8, 256), (64, 7168, 8, 256)]),
    ],
)
def test_shapes_of_an_op(models: str, tp: int, tokens: list[int], op: str, expected: list[tuple[int, ...]]) -> None:
    assert shapes_for(list(map(find_model, models.split())), tp, tokens, get_op(op)) == tuple(expected)


def test_shapes_fit_their_op() -> None:
    for spec in SHAPED:
        for shape in shapes_for([find_model("deepseek-v3")], 4, [1], spec):
            assert len(shape) == spec.rank_of_shape


def test_unknown_model_names_the_nearest_and_all() -> None:
    with pytest.raises(UnknownNameError, match=r"did you mean 'llama3-70b'.*gpt-oss-20b"):
        find_model("lama3-70b")


@pytest.mark.parametrize(
    ("name", "tp", "text"),
    [
        ("llama3-70b", 3, "64 attention heads, which 3 ranks"),
        ("llama3-70b", 0, "at least 1, got 0"),
        ("mistaken", 6, "8 heads of keys and values, which 6 ranks"),
        ("gpt-oss-20b", 128, "64 attention heads, which 128 ranks"),
    ],
)
def test_a_tp_that_does_not_split_the_model(name: str, tp: int, text: str) -> None:
    odd = replace(find_model("llama3-8b"), num_heads=48, num_kv_heads=8, intermediate_size=144)
    model = odd if name == "mistaken" else find_model(name)
    for op in SHAPED:
        with pytest.raises(UnsupportedInputError, match=text):
            shapes_for([model], tp, [1], op)


@pytest.mark.parametrize(
    ("tokens", "op", "text"),
    [([4, 0], "all_reduce", "got 0"), ([4], "all_to_all", "all_to_all"), ([1], "ep_dispatch", "llama3-8b")],
)
def test_no_tokens_and_ops_that_do_not_follow_from_a_model(tokens: list[int], op: str, text: str) -> None:
    with pytest.raises(UnsupportedInputError, match=text):
        shapes_for([find_model("llama3-8b")], 2, tokens, get_op(op))


def test_the_catalogue_needs_no_torch() -> None:
    code = "import sys; from tunedcomm.cli.models import catalog; print(len(catalog()), 'torch' in sys.modules)"
    done = python("-c", code)
    assert done.stdout.split()[1] == "False"
