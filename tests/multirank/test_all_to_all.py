"""all_to_all on the host backend: every variant bit for bit, the lane shared with all_reduce, and the public call."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from cases import Ranks
from quick import some
from variant_checks import bits_of, check_variant, launch_variant, limits_of

import tunedcomm
from tunedcomm import kernels
from tunedcomm.dispatch.communicator import get_communicator
from tunedcomm.spec import DTYPES, Candidate, Problem, check_candidate, variants

RANKS = Ranks()


kernels.discover()
KERNELS = sorted(name for name, variant in variants("all_to_all").items() if variant.kernels)
SIZES = (1, 3, 64, 333, 2050)


def asked(numel: int, dtype: str, world_size: int) -> Problem:
    return Problem("all_to_all", (numel,), dtype, world_size, reduction="", mode="eager")


def all_bits(problem: Problem, rank: int) -> tuple[torch.Tensor]:
    """What one rank sends: the sentinel, the escape and words next to them among NaN, infinities and subnormals."""
    awkward = [-0x80000000, -0x7FFFFFFF, -0x7FFFFFFE, 0, -1, 0x7FC00001, -0x7F7FFFFB, 0x7F800000, 1, -0x7FFF8000]
    dtype = getattr(torch, problem.dtype)
    size = problem.nbytes * problem.world_size
    words = torch.tensor(awkward, dtype=torch.int64).to(torch.int32).repeat(-(-size // 40) + 1)
    words = words[rank % 3 :].contiguous()
    words[5::23] = torch.arange(len(words[5::23]), dtype=torch.int32) - rank
    return (words.view(torch.uint8)[:size].clone().view(dtype),)


def expected_bits(sent: list[tuple[torch.Tensor]], rank: int, world_size: int) -> torch.Tensor:
    return torch.cat([bits_of(x).view(world_size, -1)[rank] for (x,) in sent])


def check_bits(communicator: tunedcomm.Communicator, problem: Problem, variant: str) -> None:
    sent = [all_bits(problem, rank) for rank in range(problem.world_size)]
    (out,) = launch_variant(communicator, problem, variant, sent[communicator.rank])
    assert torch.equal(bits_of(out), expected_bits(sent, communicator.rank, problem.world_size)), (variant, problem)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sizes(rank: int, world_size: int) -> None:
    """Sizes up and down on one lane, dtypes in turn: every call leaves the lane fit for any other."""
    communicator = get_communicator()
    count = 0
    for variant in (*KERNELS, "library"):
        for numel in some((*SIZES, *reversed(SIZES)), 4):
            problem = asked(numel, DTYPES[count % len(DTYPES)], world_size)
            check_variant(communicator, problem, variant, seed=count, kind="integers" if count % 3 == 0 else "random")
            check_bits(communicator, problem, variant)
            count += 1


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_copy_engines(rank: int, world_size: int) -> None:
    """The copy engines' ring, shorter and longer than its places, with flag kernels of others between."""
    communicator, checked = get_communicator(), 0
    for numel in (1, 333, 4099, 9000):
        for streams, chunks in ((1, 1), (world_size - 1, 4), (1, 8), (1, 32)):
            config = {"direction": "push", "num_streams": streams, "num_chunks": chunks}
            problem = asked(numel, "float32", world_size)
            if check_candidate(problem, Candidate.of("all_to_all", "copy_engine", config), limits_of(communicator)):
                continue
            for seed in (1, 2):
                check_variant(communicator, problem, "copy_engine", seed=seed, config=config)
                check_variant(communicator, asked(seed, "int8", world_size), "push" if seed == 1 else "pull")
            checked += 1
    assert checked == 13


def sent_by(rank: int, world_size: int, rows: int = 3, columns: int = 5) -> torch.Tensor:
    numel = world_size * rows * columns
    return (torch.arange(numel, dtype=torch.float32) + 1000 * rank).view(world_size * rows, columns)


def received(rank: int, world_size: int, rows: int = 3, columns: int = 5) -> torch.Tensor:
    everyone = [sent_by(r, world_size, rows, columns) for r in range(world_size)]
    return torch.cat([x[rank * rows : (rank + 1) * rows] for x in everyone])


def test_every_variant(rank: int) -> None:
    for name in variants("all_to_all"):
        with tunedcomm.force("all_to_all", name):
            for _ in range(3):
                assert torch.equal(tunedcomm.all_to_all(sent_by(rank, 2)), received(rank, 2)), name


def test_results_go_where_asked(rank: int) -> None:
    x, wanted = sent_by(rank, 2), received(rank, 2)
    for out in (torch.empty(6, 5), torch.zeros(6, 10)[:, ::2], torch.zeros(5, 6).t(), torch.zeros(61)[1:31].view(6, 5)):
        for name in ("lamport", "push", "library"):
            with tunedcomm.force("all_to_all", name):
                out.fill_(7.0)
                assert tunedcomm.all_to_all(x, out=out) is out
                assert torch.equal(out, wanted)
                assert torch.equal(x, sent_by(rank, 2)), "the input is left alone"


def test_symmetric_inputs(rank: int) -> None:
    for rows in (1, 40, 700):
        x = tunedcomm.symmetric_empty((2 * rows + 8) * 4, dtype=torch.float32).view(-1, 4)[4 : 4 + 2 * rows]
        x.copy_(sent_by(rank, 2, rows, 4))
        for name in ("copy_engine", "pull", "lamport", "push", "library"):
            with tunedcomm.force("all_to_all", name):
                assert torch.equal(tunedcomm.all_to_all(x), received(rank, 2, rows, 4)), name
        assert torch.equal(x, sent_by(rank, 2, rows, 4))


def test_nothing_to_send(rank: int) -> None:
    for shape in ((0,), (0, 3), (2, 0), (4, 0, 2)):
        out = tunedcomm.all_to_all(torch.empty(shape))
        assert out.shape == shape


def test_a_single_rank(rank: int) -> None:
    alone = [dist.new_group([member]) for member in range(2)][rank]
    x = sent_by(rank, 1).t()
    out = tunedcomm.all_to_all(x, group=alone)
    assert torch.equal(out, x)
    assert out.data_ptr() != x.data_ptr()


def test_bad_inputs(rank: int) -> None:
    x = sent_by(rank, 2)
    for given, options, said in (
        (x.t(), {}, "chunk for each of the 2 ranks; 5 .* Pad it"),
        (torch.tensor(1.0), {}, "without any cannot be cut"),
        (torch.ones(2, dtype=torch.complex64), {}, "view_as_real"),
        ([1, 2], {}, "got list"),
        (torch.eye(2).to_sparse(), {}, "dense tensor"),
        (x, {"out": x}, "out overlaps x"),
        (x, {"out": torch.empty(3, 5)}, "out has shape"),
        (x, {"max_sms": -1}, "max_sms=-1"),
        (x.clone().requires_grad_(), {"out": torch.empty_like(x)}, "not differentiable"),
    ):
        with pytest.raises(tunedcomm.UnsupportedInputError, match=said):
            tunedcomm.all_to_all(given, **options)
    with pytest.raises(tunedcomm.UnknownNameError, match="'push'"):
        with tunedcomm.force("all_to_all", "pusch"):
            pass
    assert torch.equal(tunedcomm.all_to_all(x), received(rank, 2)), "the refusals left the group as it was"
