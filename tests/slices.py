"""Slices of a batch alone and inside the whole under numerics="ordered", drawn at random, for any device.

Dispatch decides every call from a random database and a random `max_sms`, so that candidates change from call to call.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from tunedcomm.dispatch.communicator import Communicator
from tunedcomm.dispatch.plans import plan_for
from tunedcomm.errors import InfeasibleError
from tunedcomm.kernels import source_hash_of
from tunedcomm.selection.snapshot import Row, Snapshot
from tunedcomm.spec import Candidate, Problem, check_candidate, get_op, variants

__all__ = ["GEMMS", "OPS", "Draws", "compare", "database", "some_candidates"]

GEMMS = ("ag_gemm", "gemm_rs", "gemm_ar")
OPS = ("all_reduce", "reduce_scatter", "all_reduce_bias", "all_reduce_rms_norm", *GEMMS)
_GEMM_ROWS = 4096
_KINDS = (("bfloat16", ""), ("float8_e4m3fn", "rowwise"), ("float16", ""), ("float8_e4m3fn", "tensorwise"))
_EXTRAS = {"ag_gemm": ("", "+gathered"), "gemm_ar": ("", "+bias"), "gemm_rs": ("", "+float32")}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MODES = ("graph", "eager")
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class _Sizes:
    """How much to draw on a kind of device: the largest batches, other extents, problems but for the batch, configs.

    A GPU compiles every problem's candidates.
    """

    numel: int
    rows: int
    columns: tuple[int, ...]
    matrices: tuple[tuple[int, int], ...]
    problems: int
    configs: int


_SIZES = {
    "cpu": _Sizes(3000, 24, (8, 128, 131, 256, 1000), ((32, 64), (48, 80)), 100, 24),
    "cuda": _Sizes(1 << 21, 300, (128, 1001, 5120, 8192), ((2048, 1024), (1040, 7168)), 8, 4),
}


class Draws:
    """Random problems of one op and calls of them; the same on every rank of the communicator."""

    def __init__(self, communicator: Communicator, op: str, seed: int = 0) -> None:
        self.communicator, self.spec, self.rng = communicator, get_op(op), random.Random(f"{op} {seed}")
        self.sizes = _SIZES[communicator.device.type]
        self.problems = [self._problem() for _ in range(self.sizes.problems)]
        some = [self.batch() for _ in range(6)]
        self.candidates = some_candidates(communicator, some, self.rng, self.sizes.configs)

    def _problem(self) -> Problem:
        draw, op, ranks = self.rng.choice, self.spec.name, self.communicator.world_size
        if op in GEMMS:
            dtype, scaling = draw(_KINDS)
            layout, reduction = draw(("nk", "kn")) + draw(_EXTRAS[op]), "" if op == "ag_gemm" else "sum"
            return Problem(op, (0, *draw(self.sizes.matrices)), dtype, ranks, reduction, layout=layout, scaling=scaling)
        dtype, sums = draw(("bfloat16", "float16", "float32", "bfloat16", "float64")), ("sum", "avg", "sum", "max")
        if self.spec.rank_of_shape == 1:
            return Problem(op, (0,), dtype, ranks, draw(sums))
        columns = draw(self.sizes.columns)
        scalings = [each for each in self.spec.scalings if not each.startswith("group") or columns % 128 == 0]
        return Problem(op, (0, columns), dtype, ranks, layout=draw(self.spec.layouts), scaling=draw(scalings))

    def batch(self) -> Problem:
        """A problem with a batch of any length."""
        most = {1: self.sizes.numel, 2: self.sizes.rows, 3: _GEMM_ROWS}[self.spec.rank_of_shape]
        return self._of_length(self.rng.choice(self.problems), most)

    def part(self, whole: Problem) -> tuple[int, Problem]:
        """(first row, problem) of some of the rows of a batch."""
        part = self._of_length(whole, whole.shape[0])
        rows = whole.shape[0] - part.shape[0]
        # The shape of reduce_scatter is that of one rank's result.
        return self.rng.randint(0, rows * (whole.world_size if whole.op == "reduce_scatter" else 1)), part

    def _of_length(self, problem: Problem, most: int) -> Problem:
        """Every order of magnitude of the length is as likely as another."""
        multiple = problem.world_size if problem.op in ("ag_gemm", "gemm_rs") else 1
        steps = most // multiple
        length = multiple * min(steps, int(2 ** self.rng.uniform(0, steps.bit_length())))
        return replace(problem, shape=(length, *problem.shape[1:]), mode=self.rng.choice(_MODES))

    def run(self, problem: Problem, inputs: Tensors) -> tuple[Candidate, Tensors]:
        """Make one call; the candidate, and the outputs: of all ranks where each has a share of the rows."""
        communicator = self.communicator
        outputs: Tensors = get_op(problem.op).make_outputs(problem, communicator.device)
        communicator.snapshot = database(communicator, [problem], self.candidates, self.rng)
        plan = None
        if max_sms := self.rng.choice((None, None, 32, 4)):
            with contextlib.suppress(InfeasibleError):  # nothing is that small
                plan = plan_for(communicator, problem, "ordered", max_sms)
        plan = plan or plan_for(communicator, problem, "ordered")
        plan.launch(inputs, outputs, torch.cuda.current_stream().cuda_stream if outputs[0].is_cuda else 0)
        communicator.check_peers()
        chosen = plan.candidate
        if problem.op not in ("reduce_scatter", "gemm_rs"):
            return chosen, outputs
        parts = [torch.empty_like(outputs[0]) for _ in range(problem.world_size)]
        dist.all_gather(parts, outputs[0], group=communicator.group)
        return chosen, (torch.cat(parts),)


def some_candidates(
    communicator: Communicator, problems: Sequence[Problem], rng: random.Random, count: int
) -> list[Candidate]:
    """Some configs of every ordered variant that runs one of the problems, which are of one op."""
    limits, found = replace(communicator.limits, ordered=True), []
    for variant in variants(problems[0].op).values():
        if variant.numerics == "ordered" and variant.waits_time_out and not variant.is_library:
            configs = list(variant.space.enumerate())
            rng.shuffle(configs)
            fit = (c for c in configs if any(variant.infeasible(p, c, limits) is None for p in problems))
            found += [Candidate.of(variant.op, variant.name, config) for config in itertools.islice(fit, count)]
    return found


def database(
    communicator: Communicator, problems: Sequence[Problem], candidates: Sequence[Candidate], rng: random.Random
) -> Snapshot:
    """A snapshot in which every variant that can run has a random time at the problems and twice their batch."""
    limits, rows = replace(communicator.limits, ordered=True), []
    for problem in problems:
        fit: dict[str, list[Candidate]] = {}
        for candidate in candidates:
            if candidate.op == problem.op and check_candidate(problem, candidate, limits) is None:
                fit.setdefault(candidate.variant, []).append(candidate)
        for shape in (problem.shape, (2 * problem.shape[0], *problem.shape[1:])):
            for name, some in fit.items():
                row = Row(
                    problem=replace(problem, shape=shape),
                    candidate=rng.choice(some),
                    source_hash=str(source_hash_of(problem.op, name)),
                    environment=communicator.environment,
                    latency_p50_us=rng.uniform(1, 100),
                )
                rows.append(row)
    return Snapshot(environment=communicator.environment, world_size=communicator.world_size, rows=tuple(rows))


def compare(draws: Draws, batches: int, slices: int) -> Counter[str]:
    """Run batches and some slices of each, and compare bits; variant to the number of its launches.

    Raises:
        AssertionError: a slice has other bits than the batch.
    """
    rank, device, ran = draws.communicator.rank, draws.communicator.device, Counter[str]()
    for seed in range(batches):
        whole = draws.batch()
        everyone = [draws.spec.make_inputs(whole, peer, seed, "random", device) for peer in range(whole.world_size)]
        chosen, expected = draws.run(whole, everyone[rank])
        ran[chosen.variant] += 1
        for _ in range(slices):
            first, part = draws.part(whole)
            other, got = draws.run(part, _inputs(part, everyone, rank, first))
            ran[other.variant] += 1
            for one, of_batch in zip(got, expected, strict=True):
                due = of_batch[first : first + len(one)]
                assert torch.equal(_bits(one), _bits(due)), f"{part} from row {first} of {whole}: {other}, {chosen}"
    return ran


def _inputs(part: Problem, everyone: Sequence[Tensors], rank: int, first: int) -> Tensors:
    """The rank's inputs for the part's rows: what has a row for each of the batch's is cut."""
    found, count = list(everyone[rank]), part.shape[0]
    if part.op in GEMMS:
        places = [0, len(found) - 2] if part.scaling == "rowwise" else [0]
    else:
        places = [place for place, tensor in enumerate(found) if tensor.shape == found[0].shape]
    for place in places:
        rows = found[place]
        if part.op == "ag_gemm":  # a rank has its share of A
            rows, count = torch.cat([given[place] for given in everyone]), part.shape[0] // part.world_size
            found[place] = rows[first + rank * count :][:count].clone()
        else:
            scattered = part.world_size if part.op == "reduce_scatter" else 1
            found[place] = rows[first : first + count * scattered].clone()
    return tuple(found)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(_BITS[tensor.element_size()])
