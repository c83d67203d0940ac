"""When the fusion pass fuses: what the tuning table says, what the caller asks for; its identity, records and log."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from cases import Launched, Ranks, spy_on_launches
from fusion_samples import compiled, fused_ops, inductor
from gemm_samples import drawn
from programs import python
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

import tunedcomm
from tunedcomm import kernels
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.selection.snapshot import Row, Snapshot
from tunedcomm.spec import Candidate, Problem, get_variant

WORLD_SIZE = 2
RANKS = Ranks(prepare=inductor)
M, K, N = 8, 64, 64
GEMM = Problem("gemm_ar", (M, N, K), "bfloat16", WORLD_SIZE, "sum", layout="kn", mode="eager")
BIASED = Problem("gemm_ar", (M, N, K), "bfloat16", WORLD_SIZE, "sum", layout="kn+bias", mode="eager")
NORM = Problem("all_reduce_rms_norm", (M, N), "bfloat16", WORLD_SIZE, "sum", layout="", mode="eager")
ON_WIRE = Problem("all_reduce", (M * N,), "bfloat16", WORLD_SIZE, "sum", scaling="int8_group128", mode="eager")
BIAS = Problem("all_reduce", (N,), "bfloat16", WORLD_SIZE, "sum", mode="eager")
Tensor = torch.Tensor


def product(x: Tensor, w: Tensor) -> Tensor:
    return funcol.all_reduce(x @ w, "sum", dist.group.WORLD) * 2


def linear(x: Tensor, w: Tensor) -> Tensor:
    return funcol.all_reduce(torch.addmm(w[0], x, w), "sum", dist.group.WORLD) * 2


def normed(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(funcol.all_reduce(x @ w, "sum", dist.group.WORLD), (N,), w[0], 1e-6)


def operands(rank: int, rows: int = M) -> tuple[Tensor, Tensor]:
    return drawn(rank, rows, K, dtype=torch.bfloat16), drawn(9, K, N, dtype=torch.bfloat16)


def row(problem: Problem, variant: str, latency_us: float, library_us: float) -> Row:
    communicator = get_communicator()
    known = get_variant(problem.op, variant)
    candidate = Candidate.of(problem.op, variant, known.default(problem, communicator.limits))
    return Row(
        problem=problem,
        candidate=candidate,
        source_hash=kernels.source_hash(known),
        environment=communicator.environment,
        latency_p50_us=latency_us,
        baseline_p50_us=library_us,
        final=True,
    )


@contextlib.contextmanager
def table(*rows: Row) -> Iterator[None]:
    """Inside the block the group dispatches from these rows."""
    communicator = get_communicator()
    before, here = communicator.snapshot, communicator.environment
    communicator.replace_snapshot(Snapshot(environment=here, world_size=WORLD_SIZE, rows=tuple(rows)))
    try:
        yield
    finally:
        communicator.replace_snapshot(before)


def outcome(function: Callable[..., Any], rank: int, rows: int = M, **options: Any) -> tuple[list[str], str]:
    """What was fused, and the records in words; results are as without the pass."""
    fusion = tunedcomm.fusion_pass(**{"even_shards": True, **options})
    x, w = operands(rank, rows)
    with torch.no_grad():
        atol = 1.0 if "wire" in options else 3e-1
        torch.testing.assert_close(compiled(function, fusion)(x, w), function(x, w), rtol=3e-2, atol=atol)
    return fused_ops(fusion), str(fusion)


def test_what_the_table_says(rank: int) -> None:
    fused, said = outcome(product, rank)
    assert not fused
    assert "it does not pay" in said
    launched: list[Launched] = []
    spy_on_launches(launched, "gemm_ar")
    with table(row(GEMM, "one_shot", 10.0, 30.0)):
        fused, said = outcome(product, rank)
        assert fused == ["gemm_ar"]
        assert "3.00x as fast as the library" in said
        assert [seen.variant for seen in launched] == ["one_shot"]
        assert outcome(product, rank, when="never") == ([], f"all_reduce -> {GEMM}: left (when='never')")
        assert not outcome(product, rank, rows=64 * M)[0], "far from what was measured"
        assert not outcome(product, rank, max_sms=0)[0]
    with table(row(GEMM, "one_shot", 30.0, 29.0)):
        fused, said = outcome(product, rank)
        assert not fused
        assert "no challenger beats it" in said


def test_the_better_of_two(rank: int) -> None:
    """A sum over ranks between a product and a norm goes to the side where more is saved."""
    for gemm_us, norm_us, better in ((10.0, 15.0, "gemm_ar"), (16.0, 12.0, "all_reduce_rms_norm")):
        norm = row(NORM, "two_shot", norm_us, 30.0)
        with table(row(GEMM, "one_shot", gemm_us, 30.0), norm):
            fused, said = outcome(normed, rank)
        assert fused == [better], said
        assert f"left ({better} is more)" in said


def test_biases_cost(rank: int) -> None:
    gemm = row(BIASED, "one_shot", 10.0, 30.0)
    with table(gemm):
        assert "its bias would have to be summed, too" in outcome(linear, rank)[1]
    for bias_us, fuses in ((4.0, True), (25.0, False)):
        with table(gemm, row(BIAS, "one_shot", bias_us, 90.0)):
            fused, said = outcome(linear, rank)
        assert bool(fused) == fuses, said


def test_wires(rank: int) -> None:
    """Where asked for and tuned, the sum travels quantised; what fuses better is fused."""
    wired = row(ON_WIRE, "one_shot_quantized", 10.0, 30.0)
    with table(wired):
        ops, said = outcome(product, rank, wire="int8_group128")
        assert ops == ["all_reduce"], said
        assert "int8_group128" in said
        assert outcome(product, rank)[0] == []
        assert "all_reduce" not in outcome(product, rank, wire="int8_group128", numerics="ordered")[0]
        x, w = operands(rank)
        with torch.no_grad():
            got = compiled(product, tunedcomm.fusion_pass(wire="int8_group128"))(x, w)
            assert torch.equal(got, tunedcomm.all_reduce(x @ w, wire="int8_group128") * 2)
            assert not torch.equal(got, product(x, w))
    with table():
        assert outcome(product, rank, wire="int8_group128")[0] == []
    with table(wired, row(GEMM, "one_shot", 10.0, 90.0)):
        assert outcome(product, rank, wire="int8_group128")[0] == ["gemm_ar"]


def test_forced_variant_is_fused(rank: int) -> None:
    launched: list[Launched] = []
    spy_on_launches(launched, "gemm_ar")
    with tunedcomm.force("gemm_ar", "two_shot"):
        fused, said = outcome(product, rank)
    assert fused == ["gemm_ar"]
    assert "was forced" in said
    assert launched[-1].variant == "two_shot"


def test_identity(rank: int) -> None:
    """Equal passes share Inductor's cache; whatever changes a decision changes the identity."""
    group = dist.group.WORLD
    assert group is not None
    plain = tunedcomm.fusion_pass()
    found = [plain.uuid(), tunedcomm.fusion_pass(when="always").uuid(), tunedcomm.fusion_pass(max_sms=8).uuid()]
    found += [tunedcomm.fusion_pass(mode="graph").uuid(), tunedcomm.fusion_pass(numerics="any").uuid()]
    found.append(tunedcomm.fusion_pass(even_shards=True).uuid())
    other = dist.new_group(list(range(WORLD_SIZE)))
    found.append(tunedcomm.fusion_pass(other).uuid())
    with table(row(GEMM, "one_shot", 10.0, 30.0)):
        found.append(plain.uuid())
    with tunedcomm.force("gemm_ar", "two_shot"):
        found.append(plain.uuid())
    assert len(set(found)) == len(found)
    assert plain.uuid() == found[0] == tunedcomm.fusion_pass(group).uuid() == tunedcomm.fusion_pass(None, group).uuid()
    assert get_communicator().exchange(found) == [found] * WORLD_SIZE


def test_shards_of_plain_tensors(rank: int) -> None:
    """Of the sizes of other ranks nothing is known, so all leave a product: 127 features over two are 64 and 63."""
    width = (64, 63)[rank]
    x, w = torch.ones(M, width, dtype=torch.bfloat16), torch.ones(width, N, dtype=torch.bfloat16)
    fusion = tunedcomm.fusion_pass()
    with table(row(GEMM, "one_shot", 10.0, 30.0)), torch.no_grad():
        torch.testing.assert_close(compiled(product, fusion)(x, w), product(x, w))
        fused, said = outcome(product, rank, even_shards=False)
    assert not fused_ops(fusion)
    assert not fused
    assert "ranks may differ in the rows of arg1_1, 64: it is not known from parameters" in said


def test_logs(rank: int) -> None:
    texts: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("tunedcomm.integrations.fusion")
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    _, said = outcome(product, rank, when="always")
    logger.removeHandler(handler)
    assert texts == [said] == [f"all_reduce -> {GEMM}: fused (when='always')"]


class Counting(CustomGraphPass):
    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.graphs += 1

    def uuid(self) -> str:
        return "counting"


def test_beside_another_pass(rank: int) -> None:
    """A pass that is set already goes on; what was set comes back, also from nested blocks."""
    counting, fusion = Counting(), tunedcomm.fusion_pass(when="always", even_shards=True)
    if torch.__version__ < "2.12":  # takes one pass
        with config.patch(post_grad_custom_post_pass=counting):
            with pytest.raises(tunedcomm.UnsupportedInputError, match="takes one pass"):
                fusion.__enter__()
        return
    x, w = operands(rank)
    with torch.no_grad(), config.patch(post_grad_custom_post_pass=counting):
        compiled(product, fusion)(x, w)
        with fusion, fusion:
            assert config.post_grad_custom_post_pass == [counting, fusion, fusion]
        assert config.post_grad_custom_post_pass is counting
    assert config.post_grad_custom_post_pass is None
    assert counting.graphs == 1
    assert fused_ops(fusion) == ["gemm_ar"]


def test_bad_arguments(rank: int) -> None:
    for options, said in (
        ({"when": "maybe"}, "when='maybe'"),
        ({"mode": "reduce-overhead"}, "mode='reduce-overhead'"),
        ({"numerics": "exact"}, "numerics='exact'"),
        ({"max_sms": -1}, "max_sms=-1"),
        ({"wire": "fp4"}, "wire='fp4'"),
    ):
        with pytest.raises(tunedcomm.UnsupportedInputError, match=said):
            tunedcomm.fusion_pass(**options)  # type: ignore[arg-type]
    nobody = [dist.new_group([r]) for r in range(WORLD_SIZE)][1 - rank]
    with pytest.raises(tunedcomm.GroupError):
        tunedcomm.fusion_pass(nobody)


@pytest.mark.slow
def test_torch_logs() -> None:
    """As the page says: the log is switched on by the module's name, which is found without importing much."""
    code = "import torch, logging; logging.getLogger('tunedcomm.integrations.fusion').info('heard')"
    assert "heard" in python("-c", code, TORCH_LOGS="tunedcomm.integrations.fusion").stderr
    assert "heard" not in python("-c", code).stderr
