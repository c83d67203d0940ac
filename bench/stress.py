"""Launch every variant of every op over and over on one lane, and look at every result.

    torchrun --nproc-per-node 4 bench/stress.py --launches 10000 --csv bench/results/stress/stress_h200.csv

Sizes and configs are random and each rank waits at random before launches. Outputs are poisoned before and compared
after: the bits of ordered variants with the op's ordered reference, other variants with whole numbers whose sums are
exact where their dtype holds them, and within the op's tolerance where not. What only moves data is given the words
that packets must not hold. Variants take turns in random order, so every op runs in the midst of the others. With
--graph the launches are captured, one of every variant a graph and nothing between them, and the graphs are replayed in
random order: kernels that are launched before the last one has ended meet each other only there.

With --concurrent ranks that share a GPU run at once, which takes MPS and small grids:

    export TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mps
    nvidia-cuda-mps-control -d
    torchrun --nproc-per-node 2 bench/stress.py --concurrent --seconds 90 --csv concurrent.csv
    echo quit | nvidia-cuda-mps-control

Candidates with at most 16 blocks are mixed at random, in graphs and in eager calls of a lane of their own by turns
(--overlap: on a stream of their own, at the same time); both lanes read inputs that change all the time. A kernel
compares the bits of every output, and of some bytes behind it, with what they ought to be. Larger grids starve each
other there, so a PeerTimeoutError in this mode need not be a fault of a kernel; a wrong result is one.

Ops are all but the fused GEMMs unless --op names some; --variant leaves out all others. Every variant is launched
--launches times (--concurrent: on average), or until --seconds are over.

A row of the CSV is a variant: its launches, how many of them were wrong, and the versions. A variant that cannot run
here has a row with the reason and no launches. Ends with code 1 after a wrong result; a hang ends in PeerTimeoutError,
or, of variants that wait without a bound, in a dump of every thread after --hang-s seconds. Without a GPU the ranks are
processes that interpret the kernels (TRITON_INTERPRET=1), on few elements and with the defaults alone.
"""

from __future__ import annotations

import faulthandler
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

os.environ.setdefault("TUNEDCOMM_PEER_TIMEOUT_S", "20")

import torch
import torch.distributed as dist
from rows import append, arguments, of_run

from tunedcomm import kernels
from tunedcomm.bench.runner import start_group
from tunedcomm.dispatch.communicator import Communicator, get_communicator
from tunedcomm.errors import InfeasibleError, PeerTimeoutError
from tunedcomm.kernels.common.packets import ESCAPE
from tunedcomm.kernels.common.sync import SENTINEL
from tunedcomm.spec import Candidate, Problem, Variant, check_candidate, get_op, ops, variants
from tunedcomm.tuner.measure.compile_pool import CompilePool

# isort: split
from judge import GROUP, Counted, Group, Judge, Judged, Sample, packed, parts_of, room_for, unpacked  # imports Triton

Tensors: TypeAlias = tuple[torch.Tensor, ...]

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# What packets mark and disguise, zeros of both signs, NaNs with a payload, all ones.
WORDS = (SENTINEL.value, ESCAPE.value, 0, -1, 0x7FC01234, -0x003FEDCC, 0x7F800000)
ROUNDS = 20  # between two looks at the results
CONFIGS = 4  # of a variant at one problem, the default among them
NUMELS = (1, 333, 2048, 30_001, 262_144, 1_000_003, 4_194_312)
MATRICES = ((1, 8192), (3, 4096), (16, 5120), (33, 128), (64, 8192), (129, 5120), (300, 8192))
# With --concurrent:
MOST_BLOCKS = 16  # of a grid
MOST_BYTES = 1 << 19  # of a launch's outputs
SLOTS, FILLINGS = 3, 5  # sets of inputs that a lane reads, and contents that those have in turn
ON_GPU, ON_HOST = (4, 200), (1, 1)  # launches of a trial in a lane's batches; batches between two looks by the host
BATCHES = {"graph": 12, "eager": 3}  # groups of a batch, by lane
SAY_EVERY_S = 5.0
PRODUCTS = ((8, 512, 256), (48, 264, 520), (512, 1024, 1024), (2048, 1024, 768))


@dataclass(eq=False, slots=True, kw_only=True)
class Trial(Counted):
    """A candidate whose launches read the same inputs and are judged one by one.

    Attributes:
        outputs: two sets in turn, so that what a launch writes late falls upon the next but one.
    """

    inputs: Tensors
    is_right: Callable[[Tensors], torch.Tensor]
    outputs: tuple[Tensors, Tensors]


@dataclass(eq=False, slots=True)
class Entry:
    """A variant with what it is launched on, or the reason why it is not."""

    variant: Variant
    planned: list[tuple[Problem, Candidate]] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)


def tell(text: str) -> None:
    sys.stderr.write(f"rank {dist.get_rank()}: {text}\n")
    sys.stderr.flush()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(BITS[tensor.element_size()])


def some_problems(op: str, world_size: int, shuffle: random.Random, most: int) -> Iterator[Problem]:
    """Odd, small and large shapes, and a few that nobody chose; dtypes, reductions, layouts and scalings in turn."""
    spec = get_op(op)
    if spec.rank_of_shape == 1:
        shapes: list[tuple[int, ...]] = [(n,) for n in (*NUMELS, *(int(2 ** shuffle.uniform(0, 20)) for _ in range(3)))]
    elif spec.rank_of_shape == 2:
        shapes = [*MATRICES, (shuffle.randrange(1, 600), 8 * shuffle.randrange(1, 1024))]
    else:
        rows = [4 * shuffle.choice((1, 3, 7, 43, 171)) for _ in range(6)]
        others = [(m, 16 * shuffle.randrange(4, 130), 16 * shuffle.randrange(4, 130)) for m in rows]
        shapes = [(m * world_size, n, k) for m, n, k in (*PRODUCTS, *others)]
    dtypes = [dtype for dtype in ("bfloat16", "float16", "float32", "float8_e4m3fn") if dtype in spec.dtypes]
    for number, shape in enumerate(shape for shape in shapes if math.prod(shape[:2]) <= most):
        dtype = dtypes[number // 2 % len(dtypes)] if number % 2 else dtypes[0]
        reductions = [r for r in ("sum", "avg") if r in spec.reductions] or [""]
        layouts = [layout for layout in spec.layouts if not layout.endswith("float64")]
        scalings = spec.scalings_of(dtype)
        yield Problem(
            op, shape, dtype, world_size, reduction=reductions[number % len(reductions)],
            layout=layouts[5 * number % len(layouts)], scaling=scalings[number % len(scalings)],
        )  # fmt: skip


def disguise(everyone: Sequence[Tensors], seed: int) -> None:
    """Strew the awkward words over what every rank sends."""
    for rank, (values, *_) in enumerate(everyone):
        words = values.view(torch.uint8)[: values.nbytes // 4 * 4].view(torch.int32)
        words[(seed + rank) % 5 :: 7] = WORDS[(seed + rank) % len(WORDS)]
        words[(seed + rank) % 3 :: 31] = WORDS[0]


def moves(problem: Problem) -> bool:
    """True if the op reduces nothing."""
    return not problem.reduction and get_op(problem.op).rank_of_shape == 1


def sample(problem: Problem, kind: str, seed: int, device: torch.device) -> tuple[list[Tensors], Tensors | None]:
    """(inputs of every rank, the exact outputs of this one or None where results are right within a tolerance)."""
    op, rank = get_op(problem.op), dist.get_rank()
    everyone = [op.make_inputs(problem, peer, seed, kind, device) for peer in range(problem.world_size)]
    if moves(problem):
        disguise(everyone, seed)
    if op.ordered_reference is not None and (moves(problem) or kind == "random"):
        return everyone, tuple(op.ordered_reference(problem, everyone, rank))
    wanted, outputs = op.reference(problem, everyone, rank), op.make_outputs(problem, device)
    rounded = tuple(w.to(o.dtype) for w, o in zip(wanted, outputs, strict=True))
    exact = kind == "integers" and all(bool((r.to(w.dtype) == w).all()) for r, w in zip(rounded, wanted, strict=True))
    return everyone, rounded if exact else None


def inputs_and_judge(
    problem: Problem, kind: str, seed: int, device: torch.device
) -> tuple[Tensors, Callable[[Tensors], torch.Tensor]]:
    """(this rank's inputs, of a launch's outputs whether they are right: a bool on the device)."""
    op, rank = get_op(problem.op), dist.get_rank()
    everyone, exact = sample(problem, kind, seed, device)
    if exact is not None and (moves(problem) or kind == "random"):
        due = [bits(tensor) for tensor in exact]
        return everyone[rank], lambda outputs: _all(bits(o).eq(e).all() for o, e in zip(outputs, due, strict=True))
    if exact is not None:  # zeros may have either sign
        return everyone[rank], lambda outputs: _all(o.eq(e).all() for o, e in zip(outputs, exact, strict=True))
    wanted = op.reference(problem, everyone, rank)
    allowed = [op.tolerance[problem.scaling or problem.dtype] * w.norm() for w in wanted]
    return everyone[rank], lambda outputs: _all(
        (o.to(w.dtype) - w).norm() <= most for o, w, most in zip(outputs, wanted, allowed, strict=True)
    )


def kind_of(variant: Variant) -> str:
    return "random" if variant.numerics == "ordered" else "integers"


def _all(found: Iterator[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(found)).all()


def candidates_of(
    communicator: Communicator, variant: Variant, problem: Problem, shuffle: random.Random, most: int
) -> tuple[list[Candidate], str]:
    """(the default and others that can run, why the default cannot)."""
    default = Candidate.of(variant.op, variant.name, variant.default(problem, communicator.limits))
    reason = check_candidate(problem, default, communicator.limits) or ""
    chosen = [] if reason else [default]
    if len(chosen) < most:
        found = [
            Candidate.of(variant.op, variant.name, config)
            for config in variant.space.enumerate()
            if variant.infeasible(problem, config, communicator.limits) is None
        ]
        chosen += shuffle.sample(found, min(most - len(chosen), len(found)))
    return list(dict.fromkeys(chosen)), reason


def small_candidates_of(
    communicator: Communicator, variant: Variant, problem: Problem, shuffle: random.Random, most: int
) -> tuple[list[Candidate], str]:
    """(some whose waits end and whose grids are small, the default first if it is one, why there are none)."""
    found, reason = candidates_of(communicator, variant, problem, shuffle, variant.space.size)
    small = [c for c in found if variant.bounded and 0 <= variant.num_blocks(problem, c.config_dict) <= MOST_BLOCKS]
    if found and not small:
        reason = f"its grids have more than {MOST_BLOCKS} blocks, or are not known, or wait without a bound"
    return small[:most], "" if small else reason


def in_both_lanes(planned: Iterable[tuple[Problem, Candidate]]) -> Iterator[tuple[Problem, Candidate]]:
    """What is planned for graphs, and the same for eager calls, which do without PDL where there are graphs."""
    for problem, candidate in planned:
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
) -> list[Entry]:
    """Every variant with the problems of its op and its candidates there."""
    found = []
    num_configs, most = (CONFIGS, 1 << 23) if communicator.device.type == "cuda" else (1, 1 << 14)
    for name in names:
        entries = [Entry(variant) for variant in variants(name).values() if not only or variant.name in only]
        for problem in some_problems(name, communicator.world_size, shuffle, most):
            outputs = get_op(name).make_outputs(problem, "meta") if concurrent else ()
            if sum(output.nbytes for output in outputs) > MOST_BYTES:
                continue
            for entry in entries:
                choose = small_candidates_of if concurrent else candidates_of
                chosen, reason = choose(communicator, entry.variant, problem, shuffle, num_configs)
                entry.reasons.update([reason] if reason else [])
                planned = [(problem, candidate) for candidate in chosen]
                entry.planned += dict.fromkeys(in_both_lanes(planned)) if concurrent else planned
        found += entries
    return found


def compile_all(entries: Sequence[Entry]) -> None:
    """All binaries on all CPUs, on rank 0 of the host; the others find them in Triton's cache."""
    if torch.cuda.is_available() and dist.get_rank() % int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == 0:
        major, minor = torch.cuda.get_device_capability()
        with CompilePool(max(1, len(os.sched_getaffinity(0)) - 1)) as pool:
            for entry in entries:
                for problem, candidate in entry.planned:
                    pool.submit(entry.variant.compile_requests(problem, candidate.config_dict), 10 * major + minor)
            pool.drain()
    dist.barrier()


def bind_all(communicator: Communicator, entries: Sequence[Entry]) -> None:
    """Bind what was planned; in the same order on every rank."""
    device = communicator.device
    made: dict[tuple[Problem, str], tuple[Tensors, Callable[[Tensors], torch.Tensor]]] = {}
    for entry in entries:
        kind = kind_of(entry.variant)
        for problem, candidate in entry.planned:
            if (problem, kind) not in made:
                made[problem, kind] = inputs_and_judge(problem, kind, len(made), device)
            try:
                launch = communicator.bind(problem, candidate)
            except InfeasibleError as error:
                entry.reasons.update([str(error)])
                continue
            op = get_op(problem.op)
            outputs = op.make_outputs(problem, device), op.make_outputs(problem, device)
            wrong = torch.zeros((), dtype=torch.int64, device=device)
            inputs, is_right = made[problem, kind]
            entry.trials.append(
                Trial(
                    candidate=candidate, problem=problem, launch=launch, wrong=wrong,
                    inputs=inputs, is_right=is_right, outputs=outputs,
                )
            )  # fmt: skip


def poison(outputs: Tensors) -> None:
    for output in outputs:
        output.view(-1).view(torch.uint8).fill_(0xFF)


def wait_for_a_while(noise: random.Random) -> None:
    """Wait at random on the device and on the host, often not at all."""
    if torch.cuda.is_available() and noise.random() < 0.3:
        torch.cuda._sleep(noise.randrange(200_000))
    if noise.random() < 0.005:
        time.sleep(noise.random() * 0.002)


def current_stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream) if torch.cuda.is_available() else 0


def launch_once(trial: Trial, noise: random.Random) -> None:
    """Poison, wait for a while or not, launch, judge; nothing here waits for the device."""
    outputs = trial.outputs[trial.count % 2]
    poison(outputs)
    wait_for_a_while(noise)
    trial.launch(trial.inputs, outputs, current_stream())
    trial.wrong += ~trial.is_right(outputs)
    trial.count += 1


def launch_each(trials: Sequence[Trial], which: int) -> None:
    """Poison all, launch all without anything between, judge all."""
    for trial in trials:
        poison(trial.outputs[which])
    for trial in trials:
        trial.launch(trial.inputs, trial.outputs[which], current_stream())
    for trial in trials:
        trial.wrong += ~trial.is_right(trial.outputs[which])


def launch_groups(groups: Sequence[Group]) -> None:
    for group in groups:
        group.launch(current_stream())


@dataclass(eq=False, slots=True)
class Batch:
    """Launches in a fixed order; if they are captured they are replayed, else launched anew each time."""

    trials: Sequence[Counted]
    launch_all: Callable[[], None]
    captured: torch.cuda.CUDAGraph | None = None

    def capture(self) -> None:
        """Capture the launches, where there is a GPU; each was launched before, for a capture may not be the first."""
        if torch.cuda.is_available():
            self.captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.captured):
                self.launch_all()

    def run(self, noise: random.Random) -> None:
        wait_for_a_while(noise)
        (self.launch_all if self.captured is None else self.captured.replay)()
        for trial in self.trials:
            trial.count += 1


def graphs_of(order: Sequence[Entry], shuffle: random.Random, noise: random.Random) -> list[Batch]:
    """One launch of every variant a graph, in as many graphs as have every trial."""
    for entry in order:
        for trial in entry.trials:
            launch_once(trial, noise)
    found = []
    for number in range(max((len(entry.trials) for entry in order), default=0)):
        trials = [entry.trials[number % len(entry.trials)] for entry in order]
        shuffle.shuffle(trials)
        found.append(Batch(trials, partial(launch_each, trials, number % 2)))
        found[-1].capture()
    return found


def is_over(communicator: Communicator, wrong: torch.Tensor, done: bool) -> bool:
    """Wait for the device; true on every rank if one is done or saw a wrong result."""
    if communicator.device.type == "cuda":
        torch.cuda.synchronize()
    communicator.check_peers()
    over = torch.tensor([done or bool(wrong)], device=communicator.device).int()
    dist.all_reduce(over, dist.ReduceOp.MAX)
    return bool(over.item())


def run(communicator: Communicator, entries: Sequence[Entry], launches: int, seconds: float, *, graph: bool) -> float:
    """Until each variant had so many launches, or the time is over; returns the seconds it took."""
    shuffle, noise = random.Random(11), random.Random(1000 + dist.get_rank())
    begin, order, done = time.monotonic(), [entry for entry in entries if entry.trials], 0
    if not order:
        raise SystemExit("no variant can run here: " + "; ".join(reason for e in entries for reason in e.reasons))
    graphs = graphs_of(order, shuffle, noise) if graph else []
    while done < launches:
        for _ in range(min(ROUNDS, launches - done)):
            shuffle.shuffle(order)
            if graphs:
                shuffle.choice(graphs).run(noise)
            for entry in order if not graphs else ():
                launch_once(shuffle.choice(entry.trials), noise)
            done += 1
        wrong = torch.stack([trial.wrong for entry in order for trial in entry.trials]).sum()
        if is_over(communicator, wrong, time.monotonic() - begin > seconds):
            break
    return time.monotonic() - begin


@dataclass(eq=False, slots=True)
class Lane:
    """One lane of the workspace with what it launches.

    Attributes:
        slots: what the launches read and ought to give, flat; the contents change between batches.
        stream: where it runs; None for the current stream.
        trials: each is in some of the batches.
    """

    slots: list[torch.Tensor]
    stream: torch.cuda.Stream | None
    trials: list[Judged] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)

    def step(self, fillings: Sequence[torch.Tensor], shuffle: random.Random, noise: random.Random) -> None:
        """Fill a slot anew and run a batch; both are the same on every rank."""
        with torch.cuda.stream(self.stream):
            shuffle.choice(self.slots).copy_(shuffle.choice(fillings))
            shuffle.choice(self.batches).run(noise)


def bind_lanes(
    communicator: Communicator, entries: Sequence[Entry], *, overlap: bool
) -> tuple[dict[str, Lane], list[torch.Tensor], torch.Tensor]:
    """(the lanes with their trials, what slots are filled with, the counters of wrong results)."""
    device = communicator.device
    numbers: dict[tuple[Problem, str], int] = {}
    for entry in entries:
        for problem, _ in entry.planned:
            numbers.setdefault((replace(problem, mode="graph"), kind_of(entry.variant)), len(numbers))
    made: list[list[Sample]] = []
    for filling in range(FILLINGS):
        found = [sample(*key, filling * len(numbers) + number, device) for key, number in numbers.items()]
        made.append([Sample(everyone[communicator.rank], due or ()) for everyone, due in found])
    fillings = [packed(samples, device) for samples in made]
    lanes, sets = {}, {}
    for mode in BATCHES:
        stream = torch.cuda.Stream() if overlap and device.type == "cuda" else None
        lanes[mode] = Lane([filling.clone() for filling in fillings[:SLOTS]], stream)
        sets[mode] = [unpacked(slot, made[0]) for slot in lanes[mode].slots]
    wrong = torch.zeros(sum(len(entry.planned) for entry in entries), dtype=torch.int64, device=device)
    count = 0
    for entry in entries:
        for problem, candidate in entry.planned:
            number = numbers[replace(problem, mode="graph"), kind_of(entry.variant)]
            mine = [samples[number] for samples in sets[problem.mode]]
            if not mine[0].due:
                entry.reasons.update(["its results are right within a tolerance, and only bits are compared here"])
                continue
            try:
                launch = communicator.bind(problem, candidate)
            except InfeasibleError as error:
                entry.reasons.update([str(error)])
                continue
            room = room_for(mine[0].due, device)
            lanes[problem.mode].trials.append(
                Judged(
                    candidate=candidate, problem=problem, launch=launch, wrong=wrong[count], number=count,
                    inputs=[each.inputs for each in mine], outputs=parts_of(room, mine[0].due), room=room,
                    due=[each.due[0].data_ptr() for each in mine],
                )
            )  # fmt: skip
            count += 1
    return lanes, fillings, wrong


def some_groups(trials: Sequence[Judged], passes: int, shuffle: random.Random) -> Iterator[list[tuple[Judged, int]]]:
    """Every trial so many times, in random order and groups of random length; no trial twice in a group."""
    for _ in range(passes):
        order = shuffle.sample(trials, len(trials))
        while order:
            length = shuffle.randint(1, GROUP)
            yield [(trial, shuffle.randrange(SLOTS)) for trial in order[:length]]
            order = order[length:]


def run_concurrent(
    communicator: Communicator, entries: Sequence[Entry], launches: int, seconds: float, *, overlap: bool
) -> tuple[list[Judged], float]:
    """Run both lanes until there were so many launches for each variant, or the time is over; (trials, seconds)."""
    shuffle, noise = random.Random(11), random.Random(1000 + dist.get_rank())
    lanes, fillings, wrong = bind_lanes(communicator, entries, overlap=overlap)
    trials = [trial for lane in lanes.values() for trial in lane.trials]
    if not trials:
        raise SystemExit("no variant can run here: " + "; ".join(reason for e in entries for reason in e.reasons))
    passes, steps = ON_GPU if communicator.device.type == "cuda" else ON_HOST
    planned = {mode: list(some_groups(lane.trials, passes, shuffle)) for mode, lane in lanes.items()}
    judge = Judge([group for groups in planned.values() for group in groups], wrong)
    rest = iter(judge.groups)
    for mode, lane in lanes.items():
        groups = [next(rest) for _ in planned[mode]]
        for at in range(0, len(groups), BATCHES[mode]):
            held = groups[at : at + BATCHES[mode]]
            lane.batches.append(Batch([t for group in held for t, _ in group.launches], partial(launch_groups, held)))
    enough = launches * len({(trial.candidate.op, trial.candidate.variant) for trial in trials})
    begin = said = time.monotonic()
    try:
        for lane in lanes.values():
            for batch in lane.batches:
                batch.run(noise)
            is_over(communicator, wrong.sum(), False)
        for batch in lanes["graph"].batches:
            batch.capture()
        dist.barrier()  # waits of kernels are bounded, and captures take seconds
        while True:
            for _ in range(steps):
                for lane in lanes.values():
                    lane.step(fillings, shuffle, noise)
            done, now = sum(trial.count for trial in trials), time.monotonic()
            if is_over(communicator, wrong.sum(), done >= enough or now - begin > seconds):
                break
            if now - said > SAY_EVERY_S and dist.get_rank() == 0:
                said = now
                tell(f"{done:,} launches of {len(trials)} trials in {now - begin:.0f} s")
    except PeerTimeoutError:
        tell(f"out of step, first the last of\n{judge.first_wrong()}")
        raise
    if first := judge.first_wrong():
        tell(f"wrong, first the last of\n{first}")
    return trials, time.monotonic() - begin


def rows_of(
    communicator: Communicator, entries: Sequence[Entry], trials: Sequence[Counted], seconds: float
) -> list[dict[str, Any]]:
    """One a variant, with what any rank saw."""
    devices: list[str] = [""] * communicator.world_size
    mine = str(torch.cuda.get_device_properties(communicator.device).uuid) if communicator.device.type == "cuda" else ""
    dist.all_gather_object(devices, mine)
    gpus, run_columns = len(set(filter(None, devices))), of_run(communicator.environment)
    rows = []
    for entry in entries:
        names = (entry.variant.op, entry.variant.name)
        own = [trial for trial in trials if (trial.candidate.op, trial.candidate.variant) == names]
        wrong = torch.tensor([sum(int(trial.wrong) for trial in own)], device=communicator.device)
        dist.all_reduce(wrong)
        reason = entry.reasons.most_common(1)[0][0] if entry.reasons and not own else ""
        rows.append(
            {
                "op": entry.variant.op,
                "variant": entry.variant.name,
                "numerics": entry.variant.numerics,
                "world_size": communicator.world_size,
                "gpus": gpus,
                "launches": sum(trial.count for trial in own),
                "wrong": int(wrong),
                "configs": len({trial.candidate for trial in own}),
                "problems": len({trial.problem for trial in own}),
                "not_run": reason,
                "seconds": round(seconds, 1),
                **run_columns,
            }
        )
    return rows


def stress(
    names: Sequence[str],
    launches: int,
    seconds: float,
    only: Collection[str] = (),
    *,
    graph: bool = False,
    concurrent: bool = False,
    overlap: bool = False,
) -> list[dict[str, Any]]:
    """The rows of one run of these ops, of these variants alone if some are named; torch.distributed is initialised."""
    communicator = get_communicator()
    entries = plan(communicator, names, random.Random(7), only, concurrent=concurrent)
    compile_all(entries)
    trials: Sequence[Counted]
    if concurrent:
        trials, took = run_concurrent(communicator, entries, launches, seconds, overlap=overlap)
    else:
        bind_all(communicator, entries)
        took = run(communicator, entries, launches, seconds, graph=graph)
        trials = [trial for entry in entries for trial in entry.trials]
    for trial in trials:
        if int(trial.wrong):
            tell(f"{int(trial.wrong)} of {trial.count} launches were wrong: {trial.problem} {trial.candidate}")
    return rows_of(communicator, entries, trials, took)


def main() -> None:
    modes = {"graph": False, "concurrent": False, "overlap": False}
    options = {"launches": 300, "seconds": 1e9, "hang_s": 280.0, "csv": None}
    args = arguments(__doc__, op=[], variant=[], **modes, **options)
    faulthandler.dump_traceback_later(args.hang_s, exit=True)
    start_group()
    kernels.discover()
    names = args.op or [name for name in ops() if get_op(name).rank_of_shape < 3]
    modes = {mode: getattr(args, mode) for mode in modes}
    rows = stress(names, args.launches, args.seconds, args.variant, **modes)
    if dist.get_rank() == 0:
        for row in rows:
            sys.stdout.write("{op:20} {variant:18} {launches:>7} launches, {wrong} wrong {not_run}\n".format(**row))
        if args.csv:
            append(args.csv, rows)
        launches, ranks = sum(row["launches"] for row in rows), dist.get_world_size()
        sys.stdout.write(f"{launches:,} launches on {ranks} ranks in {rows[0]['seconds']} s\n")
    wrong = sum(row["wrong"] for row in rows)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
