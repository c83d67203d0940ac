"""Launch every variant of every op over and over on one lane, and look at every result.

    torchrun --nproc-per-node 4 bench/stress.py --launches 10000 --csv bench/results/stress/stress_h200.csv

Sizes and configs are random and each rank waits at random before launches. Outputs, and some bytes behind them, are
poisoned before and compared after: the bits of ordered and quantised variants with the op's references, other variants
with whole numbers whose sums are exact where their dtype holds them, and within the op's tolerance where not. What only
moves data is given the words that packets must not hold. Variants take turns in random order, so every op runs in the
midst of the others. With --graph the launches are captured, one of every variant a graph and nothing between them, and
the graphs are replayed in random order: kernels that are launched before the last one has ended meet each other only
there.

With --concurrent ranks that share a GPU run at once, which takes MPS and small grids:

    export TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mps
    nvidia-cuda-mps-control -d
    torchrun --nproc-per-node 2 bench/stress.py --concurrent --seconds 90 --csv concurrent.csv
    echo quit | nvidia-cuda-mps-control

Candidates with at most 16 blocks are mixed at random, in graphs and in eager calls of a lane of their own by turns.
Both lanes read inputs that change all the time. Larger grids starve each other there, so a PeerTimeoutError in this
mode need not be a fault of a kernel; a wrong result is one.

With --buffers the layout `tokens` of ep_dispatch and ep_combine runs in memory that peers address, two slots in turn,
and no other op unless --op names it; the variants tokens_direct and tokens_pull run nowhere else. --tokens leaves out
the problems of more tokens, so that many launches take little time:

    torchrun --nproc-per-node 2 bench/stress.py --buffers --tokens 64 --launches 100000 \\
        --variant tokens_direct --variant tokens_pull

Ops are all but the fused GEMMs unless --op names some; --variant leaves out all others. Every variant is launched
--launches times (--concurrent: on average), or until --seconds are over.

A row of the CSV is a variant at a scaling: its launches, how many of them were wrong, and the versions. A variant that
cannot run here has a row with the reason and no launches. Ends with code 1 after a wrong result; a hang ends in
PeerTimeoutError, or, of variants that wait without a bound, in a dump of every thread after --hang-s seconds. Without a
GPU the ranks are processes that interpret the kernels (TRITON_INTERPRET=1), on few elements and with the defaults
alone.
"""

from __future__ import annotations

import faulthandler
import itertools
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

os.environ.setdefault("TUNEDCOMM_PEER_TIMEOUT_S", "20")

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from ranks import compile_all
from rows import arguments, of_run

from tunedcomm import kernels
from tunedcomm.bench.csv import append_rows
from tunedcomm.dispatch.communicator import Communicator
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.errors import InfeasibleError, UnsupportedInputError
from tunedcomm.fp8 import WIRES
from tunedcomm.kernels.common.packets import ESCAPE
from tunedcomm.kernels.common.reference import fill_sentinel
from tunedcomm.kernels.common.sync import SENTINEL
from tunedcomm.ops.symmetric import symmetric_empty
from tunedcomm.spec import Candidate, OpSpec, Problem, Variant, check_candidate, get_op, ops, variants
from tunedcomm.tuner.gang.ranks import join_group
from tunedcomm.tuner.measure.correctness import GUARD_BYTES, Guarded, guard, make_case

Tensors: TypeAlias = tuple[torch.Tensor, ...]

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# What packets mark and disguise, zeros of both signs, NaNs with a payload, all ones.
WORDS = (SENTINEL.value, ESCAPE.value, 0, -1, 0x7FC01234, -0x003FEDCC, 0x7F800000)
ROUNDS = 20  # between two looks at the results
CONFIGS = 4  # of a variant at one problem, the default among them
NUMELS = (1, 333, 2048, 30_001, 262_144, 1_000_003, 4_194_312)
MATRICES = ((1, 8192), (3, 4096), (12, 5120), (33, 128), (64, 8192), (129, 5120), (300, 8192))
PRODUCTS = ((8, 512, 256), (48, 264, 520), (512, 1024, 1024), (2048, 1024, 768))
# Tokens of a rank, hidden, top-k, experts.
ROUTED = (
    (1, 512, 8, 24), (7, 256, 2, 12), (33, 128, 1, 12), (64, 384, 4, 24), (64, 7168, 8, 96), (300, 256, 8, 48),
    (288, 4096, 8, 48), (600, 2048, 2, 12), (600, 2048, 8, 24),  # shards of a MiB and more, also in fp8
)  # fmt: skip
SAY_EVERY_S = 5.0
# With --concurrent:
MOST_BLOCKS = 16  # of a grid
MOST_BYTES = 1 << 19  # of a launch's outputs
SLOTS, FILLINGS = 3, 5  # sets of inputs that a lane reads, and contents that those have in turn
GROUP = 16  # launches without anything between them, at most
BATCHES = {"graph": 12, "eager": 3}  # groups of a batch, by lane
COMPARED = 4096  # elements that a block of `count_wrong` compares


@triton.jit  # type: ignore[untyped-decorator]
def count_wrong(  # type: ignore[no-untyped-def]
    got, due, before, behind, wrong, numel, pattern: tl.constexpr, guard_bytes: tl.constexpr, block: tl.constexpr
):
    """Add 1 to `wrong` for each block of elements that differ, and for guard bytes that do not hold the pattern."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < numel
    found, right = tl.load(got + at, inside), tl.load(due + at, inside)
    if found.dtype.is_floating():
        found, right = found.to(tl.float32), right.to(tl.float32)
    differ = tl.sum(((found != right) & inside).to(tl.int32))
    if tl.program_id(0) == 0:
        side = tl.arange(0, guard_bytes)
        differ += tl.sum((tl.load(before + side) != pattern).to(tl.int32))
        differ += tl.sum((tl.load(behind + side) != pattern).to(tl.int32))
    if differ > 0:
        tl.atomic_add(wrong, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One rank's inputs of a problem, and the outputs that are due.

    Attributes:
        is_bitwise: every bit must be as it is due; else zeros may have either sign.
        allowed: most distance of each output from what is due; none where results are exact.
        others: outputs that are as right bit by bit: a quantised sum may be quantised once more.
    """

    inputs: Tensors
    due: Tensors
    is_bitwise: bool = False
    allowed: Tensors = ()
    others: tuple[Tensors, ...] = ()

    def is_right(self, outputs: Sequence[Guarded]) -> torch.Tensor:
        """True on the device if outputs are as they are due and nothing around them was written."""
        found = [(side == output.pattern).all() for output in outputs for side in (output.before, output.behind)]
        for number, (output, due) in enumerate(zip(outputs, self.due, strict=True)):
            if self.allowed:
                found.append((output.tensor.to(due.dtype) - due).norm() <= self.allowed[number])
            elif self.is_bitwise:
                right = [bits(output.tensor).eq(bits(each[number])).all() for each in (self.due, *self.others)]
                found.append(torch.stack(right).any())
            else:
                found.append(output.tensor.eq(due).all())
        return torch.stack(found).all()

    def judge(self, outputs: Sequence[Guarded], wrong: torch.Tensor) -> None:
        """Add to `wrong` if these outputs are not right; one kernel an output on a GPU, where exact ones are due."""
        exact = not self.allowed and not self.others and all(output.tensor.is_contiguous() for output in outputs)
        if not exact or wrong.device.type != "cuda":
            wrong += ~self.is_right(outputs)
            return
        for output, due in zip(outputs, self.due, strict=True):
            got, wanted = (bits(output.tensor), bits(due)) if self.is_bitwise else (output.tensor, due)
            count_wrong[(max(1, triton.cdiv(got.numel(), COMPARED)),)](
                got, wanted, output.before, output.behind, wrong, got.numel(), output.pattern, GUARD_BYTES, COMPARED
            )

    def copy(self, device: torch.device) -> Sample:
        """The same in other memory; what launches read on the host is the same in all samples of a problem."""
        inputs, due, *others = (
            tuple(each.contiguous().clone() if each.device.type == device.type else each for each in tensors)
            for tensors in (self.inputs, self.due, *self.others)
        )
        return replace(self, inputs=inputs, due=due, others=tuple(others))

    def memory(self, device: torch.device) -> list[torch.Tensor]:
        """The bytes of all its tensors on the device."""
        every = itertools.chain(self.inputs, self.due, *self.others)
        there = (each for each in every if each.device.type == device.type)
        return [each.view(-1).view(torch.uint8) for each in there]


@dataclass(eq=False, slots=True)
class Trial:
    """One bound candidate at one problem.

    Attributes:
        samples: each launch reads one of them.
        rooms: two in turn, so that what a launch writes late falls upon the next but one.
        wrong: how many of its results, or blocks of them, were not right; on the device.
        count: how often it was launched.
    """

    candidate: Candidate
    problem: Problem
    launch: Callable[[Tensors, Tensors, int], None]
    samples: Sequence[Sample]
    rooms: tuple[tuple[Guarded, ...], tuple[Guarded, ...]]
    wrong: torch.Tensor
    count: int = 0

    def results(self, room: int) -> list[Guarded]:
        """The outputs in a room, with zeros where the op specifies nothing."""
        held = self.rooms[room]
        tensors = get_op(self.problem.op).mask_unspecified(self.problem, (), tuple(each.tensor for each in held))[1]
        return [replace(each, tensor=tensor) for each, tensor in zip(held, tensors, strict=True)]


@dataclass(eq=False, slots=True)
class Entry:
    """A variant with what it is launched on, or the reason why it is not."""

    variant: Variant
    to_run: list[tuple[Problem, Candidate]] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)


def tell(text: str) -> None:
    sys.stderr.write(f"rank {dist.get_rank()}: {text}\n")
    sys.stderr.flush()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(BITS[tensor.element_size()])


def is_shared(spec: OpSpec, shape: tuple[int, ...], world_size: int) -> bool:
    """True if the ranks can share such a problem evenly."""
    try:
        spec.check(Problem(spec.name, shape, spec.dtypes[0], world_size, reduction=""))
    except UnsupportedInputError:
        return False
    return True


def some_problems(op: str, world_size: int, shuffle: random.Random, most: int) -> Iterator[Problem]:
    """Odd, small and large shapes, and a few that nobody chose; dtypes, reductions, layouts and scalings in turn.

    Every scaling of ops whose shapes are not those of fused GEMMs is there.
    """
    spec = get_op(op)
    if spec.rank_of_shape == 1:
        shapes: list[tuple[int, ...]] = [(n,) for n in (*NUMELS, *(int(2 ** shuffle.uniform(0, 20)) for _ in range(3)))]
    elif spec.rank_of_shape == 2:
        shapes = [*MATRICES, (shuffle.randrange(1, 600), 128 * shuffle.randrange(1, 64))]
    elif spec.rank_of_shape == 4:
        shapes = [*ROUTED, (shuffle.randrange(1, 200), 128 * shuffle.randrange(1, 16), shuffle.randrange(1, 9), 36)]
    elif not spec.is_gemm:  # of attention: those that are swept
        shapes = [*spec.default_shapes("host", 2), *spec.default_shapes("cuda", 2)]
        shapes = [shape for shape in shapes if math.prod(shape) <= most and is_shared(spec, shape, world_size)]
    else:
        rows = [4 * shuffle.choice((1, 3, 7, 43, 171)) for _ in range(6)]
        others = [(m, 16 * shuffle.randrange(4, 130), 16 * shuffle.randrange(4, 130)) for m in rows]
        shapes = [(m * world_size, n, k) for m, n, k in (*PRODUCTS, *others)]
    dtypes = [dtype for dtype in ("bfloat16", "float16", "float32", "float8_e4m3fn") if dtype in spec.dtypes]
    dtypes = dtypes or list(spec.dtypes)
    shapes = [shape for shape in shapes if math.prod(shape[:2]) <= most]
    for number in range(max(len(shapes), 2 * len(spec.scalings) if not spec.is_gemm else 0)):
        shape = shapes[number % len(shapes)]
        dtype = dtypes[number // 2 % len(dtypes)] if number % 2 else dtypes[0]
        reductions = [r for r in ("sum", "avg") if r in spec.reductions] or [""]
        layouts = [layout for layout in spec.layouts if not layout.endswith("float64")]
        scalings = spec.scalings_of(dtype)
        turn = number // len(scalings) + number % len(scalings)  # no layout meets one scaling alone
        problem = Problem(
            op, shape, dtype, world_size, reduction=reductions[number % len(reductions)],
            layout=layouts[turn % len(layouts)], scaling=scalings[number % len(scalings)],
        )  # fmt: skip
        try:
            spec.check(problem)
        except ValueError:  # a layout that scales nothing
            problem = replace(problem, scaling="")
        yield problem


def moves(problem: Problem) -> bool:
    """True if the op does nothing but move whatever words it is given."""
    spec = get_op(problem.op)
    return not problem.reduction and spec.rank_of_shape != 4 and not spec.tolerance_of(problem)


def disguised_inputs(problem: Problem, peer: int, seed: int, kind: str, device: torch.device) -> Tensors:
    """A rank's inputs of an op that reduces nothing, with the awkward words strewn over what it sends."""
    inputs: Tensors = get_op(problem.op).make_inputs(problem, peer, seed, kind, device)
    words = inputs[0].view(-1).view(torch.uint8)[: inputs[0].nbytes // 4 * 4].view(torch.int32)
    words[(seed + peer) % 5 :: 7] = WORDS[(seed + peer) % len(WORDS)]
    words[(seed + peer) % 3 :: 31] = WORDS[0]
    return inputs


def sample(problem: Problem, kind: str, seed: int, device: torch.device) -> Sample:
    """Inputs of this kind with what this rank ought to make of them."""
    op = get_op(problem.op)
    if moves(problem):
        op = replace(op, make_inputs=disguised_inputs)
    case = make_case(op, problem, dist.get_rank(), kind=kind, seed=seed, device=device)
    if problem.input_kind == "symmetric" and not op.symmetric_outputs:
        first, *rest = case.inputs
        case = replace(
            case, inputs=(symmetric_empty(first.shape, dtype=first.dtype, device=device).copy_(first), *rest)
        )
    if case.quantized and kind == "random":
        return Sample(case.inputs, case.quantized[0], is_bitwise=True, others=case.quantized[1:])
    if case.bits is not None and (moves(problem) or kind == "random"):
        return Sample(case.inputs, case.bits, is_bitwise=True)
    pairs = list(zip(case.expected, op.make_outputs(problem, device), strict=True))
    if kind == "integers" and all(torch.equal(due.to(output.dtype).to(due.dtype), due) for due, output in pairs):
        return Sample(case.inputs, tuple(due.to(output.dtype) for due, output in pairs))
    allowed = tuple(op.tolerance_of(problem) * each.norm() for each in case.expected)
    return Sample(case.inputs, case.expected, allowed=allowed)


def key_of(variant: Variant, problem: Problem) -> tuple[Problem, str]:
    """The problem and the kind of inputs for which samples are made: random where bits of results are known."""
    is_quantized = problem.scaling in WIRES  # there the library serves unquantised
    exact = variant.numerics == "quantized" or (variant.numerics == "ordered" and not is_quantized)
    return replace(problem, mode="graph"), "random" if exact else "integers"


def candidates_of(
    communicator: Communicator, variant: Variant, problem: Problem, shuffle: random.Random, most: int, *, small: bool
) -> tuple[list[Candidate], str]:
    """(the default and others that can run, why the default cannot or there are none).

    With `small`, only those whose waits end and whose grids are small.
    """
    default = Candidate.of(variant.op, variant.name, variant.default(problem, communicator.limits))
    reason = check_candidate(problem, default, communicator.limits) or ""
    chosen = [] if reason else [default]
    others = variant.space.size if small else most - len(chosen)
    if others > 0:
        found = [
            Candidate.of(variant.op, variant.name, config)
            for config in variant.space.enumerate()
            if variant.infeasible(problem, config, communicator.limits) is None
        ]
        chosen += shuffle.sample(found, min(others, len(found)))
    if small and chosen:
        reason = f"its grids have more than {MOST_BLOCKS} blocks, or are not known, or wait without a bound"
        blocks = {each: variant.num_blocks(problem, each.config_dict) for each in chosen}
        chosen = [each for each in chosen if variant.waits_time_out and 0 <= blocks[each] <= MOST_BLOCKS]
        reason = "" if chosen else reason
    return list(dict.fromkeys(chosen))[:most], reason


def in_both_lanes(for_graphs: Iterable[tuple[Problem, Candidate]]) -> Iterator[tuple[Problem, Candidate]]:
    """The runs for graphs, and the same ones for eager calls, which do without PDL where there are graphs."""
    for problem, candidate in for_graphs:
        yield problem, candidate
        config = {name: False if name == "launch_pdl" else value for name, value in candidate.config}
        yield replace(problem, mode="eager"), Candidate.of(candidate.op, candidate.variant, config)


def plan(
    communicator: Communicator,
    names: Sequence[str],
    shuffle: random.Random,
    only: Collection[str],
    *,
    concurrent: bool = False,
    buffers: bool = False,
    tokens: int = 0,
) -> list[Entry]:
    """Every variant with the problems of its op and its candidates there."""
    found = []
    num_configs, most = (CONFIGS, 1 << 23) if communicator.device.type == "cuda" else (1, 1 << 14)
    for name in names:
        entries = [Entry(variant) for variant in variants(name).values() if not only or variant.name in only]
        # The norm has two outputs of the payload's dtype.
        largest = MOST_BYTES // 8 if concurrent and get_op(name).rank_of_shape == 2 else most
        for problem in some_problems(name, communicator.world_size, shuffle, largest):
            if tokens and problem.shape[0] > tokens:
                continue
            if buffers:
                problem = replace(problem, layout="tokens", scaling="", input_kind="symmetric")  # noqa: PLW2901
            outputs = get_op(name).make_outputs(problem, "meta") if concurrent else ()
            if sum(output.nbytes for output in outputs) > MOST_BYTES:
                continue
            for entry in entries:
                chosen, reason = candidates_of(
                    communicator, entry.variant, problem, shuffle, num_configs, small=concurrent
                )
                entry.reasons.update([reason] if reason else [])
                for_graphs = [(problem, candidate) for candidate in chosen]
                entry.to_run += dict.fromkeys(in_both_lanes(for_graphs)) if concurrent else for_graphs
        found += entries
    return found


def samples_of(entries: Sequence[Entry], device: torch.device, count: int) -> dict[tuple[Problem, str], list[Sample]]:
    """So many samples for each problem that runs. Those of a problem have one broadcast's root: it follows the seed."""
    keys = list(dict.fromkeys(key_of(entry.variant, problem) for entry in entries for problem, _ in entry.to_run))
    step = -(-len(keys) // dist.get_world_size()) * dist.get_world_size()
    return {
        key: [sample(*key, filling * step + number, device) for filling in range(count)]
        for number, key in enumerate(keys)
    }


def room_of(like: torch.Tensor, *, shared: bool) -> Guarded:
    """An output in guards; `shared`: in memory that peers address."""
    if not shared:
        return guard(like, "an output", is_input=False)
    nbytes = -(-like.nbytes // 16) * 16 + 2 * GUARD_BYTES
    whole = symmetric_empty((nbytes,), dtype=torch.uint8, device=like.device)
    made = guard(like, "an output", is_input=False, room=whole[GUARD_BYTES:])
    return replace(made, before=whole[:GUARD_BYTES].fill_(made.pattern))


def bind_all(
    communicator: Communicator,
    entries: Sequence[Entry],
    samples: Mapping[str, Mapping[tuple[Problem, str], Sequence[Sample]]],
    *,
    exact: bool,
) -> None:
    """Bind what is to run to the samples of its mode; in the same order on every rank."""
    device = communicator.device
    for entry in entries:
        for problem, candidate in entry.to_run:
            held = samples[problem.mode][key_of(entry.variant, problem)]
            if exact and held[0].allowed:
                entry.reasons["its results are right within a tolerance, and only exact ones are compared here"] += 1
                continue
            try:
                launch = communicator.bind(problem, candidate)
            except InfeasibleError as error:
                entry.reasons[str(error)] += 1
                continue
            wrong = torch.zeros((), dtype=torch.int64, device=device)
            like = get_op(problem.op).make_outputs(problem, device)
            shared = problem.input_kind == "symmetric" and get_op(problem.op).symmetric_outputs
            first, second = (tuple(room_of(each, shared=shared) for each in like) for _ in range(2))
            entry.trials.append(Trial(candidate, problem, launch, held, (first, second), wrong))
    if not any(entry.trials for entry in entries):
        raise SystemExit("no variant can run here: " + "; ".join(reason for e in entries for reason in e.reasons))


def wait_for_a_while(noise: random.Random) -> None:
    """Wait at random on the device and on the host, often not at all."""
    if torch.cuda.is_available() and noise.random() < 0.3:
        torch.cuda._sleep(noise.randrange(200_000))
    if noise.random() < 0.005:
        time.sleep(noise.random() * 0.002)


class Launch(NamedTuple):
    """One launch of a trial: the number of its sample and of its room."""

    trial: Trial
    sample: int
    room: int


def launch_group(group: Sequence[Launch]) -> None:
    """Poison all outputs, launch all without anything between, judge all; nothing here waits for the device."""
    stream = int(torch.cuda.current_stream().cuda_stream) if torch.cuda.is_available() else 0
    for trial, _, room in group:
        fill_sentinel([output.tensor for output in trial.rooms[room]])
    for trial, number, room in group:
        trial.launch(trial.samples[number].inputs, tuple(output.tensor for output in trial.rooms[room]), stream)
    for trial, number, room in group:
        trial.samples[number].judge(trial.results(room), trial.wrong)


@dataclass(eq=False, slots=True)
class Batch:
    """Groups of launches in a fixed order; if they are captured they are replayed, else launched anew each time."""

    groups: Sequence[Sequence[Launch]]
    captured: torch.cuda.CUDAGraph | None = None

    def capture(self) -> None:
        """Capture the launches, where there is a GPU; each was launched before, for a capture may not be the first."""
        if torch.cuda.is_available():
            self.captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.captured):
                self._launch()

    def run(self, noise: random.Random) -> None:
        wait_for_a_while(noise)
        (self._launch if self.captured is None else self.captured.replay)()
        for group in self.groups:
            for launch in group:
                launch.trial.count += 1

    def _launch(self) -> None:
        for group in self.groups:
            launch_group(group)


def launch_once(trial: Trial, noise: random.Random) -> None:
    Batch([[Launch(trial, 0, trial.count % 2)]]).run(noise)


def graphs_of(order: Sequence[Entry], shuffle: random.Random) -> list[Batch]:
    """One launch of every variant a batch, in as many batches as have every trial."""
    found = []
    for number in range(max(len(entry.trials) for entry in order)):
        trials = [entry.trials[number % len(entry.trials)] for entry in order]
        shuffle.shuffle(trials)
        found.append(Batch([[Launch(trial, 0, number % 2) for trial in trials]]))
    return found


def is_over(communicator: Communicator, wrong: torch.Tensor, done: bool) -> bool:
    """Wait for the device; true on every rank if one is done or saw a wrong result."""
    if communicator.device.type == "cuda":
        torch.cuda.synchronize()
    communicator.check_peers()
    over = torch.tensor([done or bool(wrong)], device=communicator.device).int()
    dist.all_reduce(over, dist.ReduceOp.MAX)
    return bool(over.item())


class Lane:
    """One lane of the workspace with what it launches.

    Attributes:
        samples: what the launches read and ought to give; the contents change between batches.
    """

    def __init__(self, fillings: Mapping[tuple[Problem, str], list[Sample]], device: torch.device) -> None:
        self.samples = {key: [each.copy(device) for each in held[:SLOTS]] for key, held in fillings.items()}
        self._slots = [self._memory(self.samples, slot, device) for slot in range(SLOTS)]
        self._fillings = [self._memory(fillings, filling, device) for filling in range(FILLINGS)]
        self.batches: list[Batch] = []

    @staticmethod
    def _memory(
        samples: Mapping[tuple[Problem, str], list[Sample]], number: int, device: torch.device
    ) -> list[torch.Tensor]:
        for held in samples.values():
            for given, first in zip(held[number].inputs, held[0].inputs, strict=True):
                assert given.device.type == device.type or torch.equal(given, first), "launches read it on the host"
        return [memory for held in samples.values() for memory in held[number].memory(device)]

    def plan(self, trials: Sequence[Trial], passes: int, groups: int, shuffle: random.Random) -> None:
        """Every trial so many times, in random order and groups of random length; no trial twice in a group."""
        found = []
        for _ in range(passes):
            order = shuffle.sample(trials, len(trials))
            while order:
                length = shuffle.randint(1, GROUP)
                found.append([Launch(t, shuffle.randrange(SLOTS), shuffle.randrange(2)) for t in order[:length]])
                order = order[length:]
        self.batches = [Batch(found[at : at + groups]) for at in range(0, len(found), groups)]

    def step(self, shuffle: random.Random, noise: random.Random) -> None:
        """Fill a slot anew and run a batch; both are the same on every rank."""
        torch._foreach_copy_(shuffle.choice(self._slots), shuffle.choice(self._fillings))
        shuffle.choice(self.batches).run(noise)


def lanes_of(communicator: Communicator, entries: Sequence[Entry], shuffle: random.Random) -> list[Lane]:
    """Both lanes, with the launches of the trials of their modes; those are bound here."""
    device = communicator.device
    made = samples_of(entries, device, FILLINGS)
    fillings = {key: [each.copy(device) for each in held] for key, held in made.items()}
    lanes = {mode: Lane(fillings, device) for mode in BATCHES}
    bind_all(communicator, entries, {mode: lane.samples for mode, lane in lanes.items()}, exact=True)
    for mode, lane in lanes.items():
        trials = [trial for entry in entries for trial in entry.trials if trial.problem.mode == mode]
        lane.plan(trials, 4 if device.type == "cuda" else 1, BATCHES[mode], shuffle)
    return list(lanes.values())


def run(
    communicator: Communicator, trials: Sequence[Trial], step: Callable[[], None], launches: int, seconds: float
) -> float:
    """Step until there were so many launches for each variant, or the time is over; returns the seconds it took."""
    num_variants = len({(trial.candidate.op, trial.candidate.variant) for trial in trials})
    begin = said = time.monotonic()
    first = sum(trial.count for trial in trials)
    while (left := launches - (sum(trial.count for trial in trials) - first) // num_variants) > 0:
        for _ in range(min(ROUNDS, left)):
            step()
        wrong, now = torch.stack([trial.wrong for trial in trials]).sum(), time.monotonic()
        if is_over(communicator, wrong, now - begin > seconds):
            break
        if now - said > SAY_EVERY_S and dist.get_rank() == 0:
            said = now
            tell(f"{sum(trial.count for trial in trials):,} launches of {len(trials)} trials in {now - begin:.0f} s")
    return time.monotonic() - begin


def rows_of(communicator: Communicator, entries: Sequence[Entry], seconds: float) -> list[dict[str, Any]]:
    """One a variant and scaling, with what any rank saw."""
    devices: list[str] = [""] * communicator.world_size
    mine = str(torch.cuda.get_device_properties(communicator.device).uuid) if communicator.device.type == "cuda" else ""
    dist.all_gather_object(devices, mine)
    gpus, run_columns = len(set(filter(None, devices))), of_run(communicator.environment)
    rows = []
    for entry in entries:
        reason = entry.reasons.most_common(1)[0][0] if entry.reasons and not entry.trials else ""
        for scaling in sorted({trial.problem.scaling for trial in entry.trials}) or [""]:
            own = [trial for trial in entry.trials if trial.problem.scaling == scaling]
            wrong = torch.tensor([sum(int(trial.wrong) for trial in own)], device=communicator.device)
            dist.all_reduce(wrong)
            row = {
                "op": entry.variant.op, "variant": entry.variant.name, "numerics": entry.variant.numerics,
                "world_size": communicator.world_size, "gpus": gpus, "launches": sum(trial.count for trial in own),
                "wrong": int(wrong), "configs": len({trial.candidate for trial in own}),
                "problems": len({trial.problem for trial in own}), "not_run": reason, "seconds": round(seconds, 1),
                **run_columns, "scaling": scaling,
            }  # fmt: skip
            rows.append(row)
    return rows


def stress(
    names: Sequence[str],
    launches: int,
    seconds: float,
    only: Collection[str] = (),
    *,
    graph: bool = False,
    concurrent: bool = False,
    buffers: bool = False,
    tokens: int = 0,
) -> list[dict[str, Any]]:
    """The rows of one run of these ops, of these variants alone if some are named; torch.distributed is initialised."""
    communicator = get_communicator()
    entries = plan(communicator, names, random.Random(7), only, concurrent=concurrent, buffers=buffers, tokens=tokens)
    compile_all(run for entry in entries for run in entry.to_run)
    shuffle, noise = random.Random(11), random.Random(1000 + dist.get_rank())
    if concurrent:
        lanes = lanes_of(communicator, entries, shuffle)
    else:
        bind_all(communicator, entries, {"graph": samples_of(entries, communicator.device, 1)}, exact=False)
    order = [entry for entry in entries if entry.trials]
    trials = [trial for entry in order for trial in entry.trials]
    graphs = lanes[0].batches if concurrent else graphs_of(order, shuffle) if graph else []

    def step() -> None:
        if concurrent:
            for lane in lanes:
                lane.step(shuffle, noise)
            return
        shuffle.shuffle(order)
        if graphs:
            shuffle.choice(graphs).run(noise)
        for entry in order if not graphs else ():
            launch_once(shuffle.choice(entry.trials), noise)

    if graphs:
        for trial in trials:
            launch_once(trial, noise)
        for batch in graphs:
            batch.capture()
        dist.barrier()  # waits of kernels are bounded, and captures take seconds
    took = run(communicator, trials, step, launches, seconds)
    for trial in trials:
        if int(trial.wrong):
            tell(f"{int(trial.wrong)} of {trial.count} launches were wrong: {trial.problem} {trial.candidate}")
    return rows_of(communicator, entries, took)


def main() -> None:
    modes = {"graph": False, "concurrent": False, "buffers": False}
    options = {"tokens": 0, "launches": 300, "seconds": 1e9, "hang_s": 280.0, "csv": None}
    args = arguments(__doc__, op=[], variant=[], **modes, **options)
    faulthandler.dump_traceback_later(args.hang_s, exit=True)
    join_group()
    kernels.discover()
    every = ("ep_dispatch", "ep_combine") if args.buffers else [n for n, spec in ops().items() if not spec.is_gemm]
    if args.buffers and args.concurrent:
        raise SystemExit("--buffers takes no --concurrent: lanes copy their inputs out of memory that peers address")
    modes = {mode: getattr(args, mode) for mode in modes}
    rows = stress(args.op or every, args.launches, args.seconds, args.variant, tokens=args.tokens, **modes)
    if dist.get_rank() == 0:
        for row in rows:
            named = f"{row['op']:20} {row['variant']:26} {row['scaling']:22}"
            sys.stdout.write(f"{named} {row['launches']:>7} launches, {row['wrong']} wrong {row['not_run']}\n")
        if args.csv:
            append_rows(args.csv, rows, rows[0])
        launches, ranks = sum(row["launches"] for row in rows), dist.get_world_size()
        sys.stdout.write(f"{launches:,} launches on {ranks} ranks in {rows[0]['seconds']} s\n")
    wrong = sum(row["wrong"] for row in rows)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
