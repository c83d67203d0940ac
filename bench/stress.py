"""Launch every variant of every op over and over on one lane, and look at every result.

    torchrun --nproc-per-node 4 bench/stress.py --launches 10000 --csv bench/results/stress/stress_h200.csv

Sizes and configs are random and each rank waits at random before launches. Outputs are poisoned before and compared
after: the bits of ordered variants with the op's ordered reference, other variants with whole numbers whose sums are
exact where their dtype holds them, and within the op's tolerance where not. What only moves data is given the words
that packets must not hold. Variants take turns in random order, so every op runs in the midst of the others. With
--graph the launches are captured, one of every variant a graph and nothing between them, and the graphs are replayed in
random order: kernels that are launched before the last one has ended meet each other only there.

Ops are all but the fused GEMMs unless --op names some; --variant leaves out all others. Every variant is launched
--launches times, or until --seconds are over.

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
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

os.environ.setdefault("TUNEDCOMM_PEER_TIMEOUT_S", "20")

import torch
import torch.distributed as dist
from rows import append, arguments, of_run

from tunedcomm import kernels
from tunedcomm.bench.runner import start_group
from tunedcomm.dispatch.communicator import Communicator, get_communicator
from tunedcomm.errors import InfeasibleError
from tunedcomm.kernels.common.packets import ESCAPE
from tunedcomm.kernels.common.sync import SENTINEL
from tunedcomm.spec import Candidate, Problem, Variant, check_candidate, get_op, ops, variants
from tunedcomm.tuner.measure.compile_pool import CompilePool

Tensors: TypeAlias = tuple[torch.Tensor, ...]

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# What packets mark and disguise, zeros of both signs, NaNs with a payload, all ones.
WORDS = (SENTINEL.value, ESCAPE.value, 0, -1, 0x7FC01234, -0x003FEDCC, 0x7F800000)
ROUNDS = 20  # between two looks at the results
CONFIGS = 4  # of a variant at one problem, the default among them
NUMELS = (1, 333, 2048, 30_001, 262_144, 1_000_003, 4_194_312)
MATRICES = ((1, 8192), (3, 4096), (33, 128), (64, 8192), (129, 5120), (300, 8192))
PRODUCTS = ((8, 512, 256), (48, 264, 520), (512, 1024, 1024), (2048, 1024, 768))


@dataclass(eq=False, slots=True)
class Trial:
    """One candidate at one problem, bound.

    Attributes:
        outputs: two sets in turn, so that what a launch writes late falls upon the next but one.
        wrong: set on the device where a result was not right.
    """

    candidate: Candidate
    problem: Problem
    launch: Callable[[Tensors, Tensors, int], None]
    inputs: Tensors
    is_right: Callable[[Tensors], torch.Tensor]
    outputs: tuple[Tensors, Tensors]
    wrong: torch.Tensor
    count: int = 0


@dataclass(eq=False, slots=True)
class Entry:
    """A variant with what it is launched on, or the reason why it is not."""

    variant: Variant
    planned: list[tuple[Problem, Candidate]] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)


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


def inputs_and_judge(
    problem: Problem, kind: str, seed: int, device: torch.device
) -> tuple[Tensors, Callable[[Tensors], torch.Tensor]]:
    """(this rank's inputs, of a launch's outputs whether they are right: a bool on the device)."""
    op, rank = get_op(problem.op), dist.get_rank()
    everyone = [op.make_inputs(problem, peer, seed, kind, device) for peer in range(problem.world_size)]
    moves = not problem.reduction and op.rank_of_shape == 1
    if moves:
        disguise(everyone, seed)
    if op.ordered_reference is not None and (moves or kind == "random"):
        exact = [bits(tensor) for tensor in op.ordered_reference(problem, everyone, rank)]
        return everyone[rank], lambda outputs: _all(bits(o).eq(e).all() for o, e in zip(outputs, exact, strict=True))
    outputs = op.make_outputs(problem, device)
    wanted = op.reference(problem, everyone, rank)
    rounded = [w.to(o.dtype) for w, o in zip(wanted, outputs, strict=True)]
    if kind == "integers" and all(bool((r.to(w.dtype) == w).all()) for r, w in zip(rounded, wanted, strict=True)):
        return everyone[rank], lambda outputs: _all(o.eq(r).all() for o, r in zip(outputs, rounded, strict=True))
    allowed = [op.tolerance[problem.scaling or problem.dtype] * w.norm() for w in wanted]
    return everyone[rank], lambda outputs: _all(
        (o.to(w.dtype) - w).norm() <= most for o, w, most in zip(outputs, wanted, allowed, strict=True)
    )


def _all(found: Iterator[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(found)).all()


def candidates_of(
    communicator: Communicator, variant: Variant, problem: Problem, shuffle: random.Random, most: int
) -> tuple[list[Candidate], str]:
    """(the default and others that can run, why there are none)."""
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


def plan(
    communicator: Communicator, names: Sequence[str], shuffle: random.Random, only: Collection[str]
) -> list[Entry]:
    """Every variant with the problems of its op and its candidates there."""
    found = []
    num_configs, most = (CONFIGS, 1 << 23) if communicator.device.type == "cuda" else (1, 1 << 14)
    for name in names:
        entries = [Entry(variant) for variant in variants(name).values() if not only or variant.name in only]
        for problem in some_problems(name, communicator.world_size, shuffle, most):
            for entry in entries:
                chosen, reason = candidates_of(communicator, entry.variant, problem, shuffle, num_configs)
                entry.reasons.update([reason] if reason else [])
                entry.planned += [(problem, candidate) for candidate in chosen]
        found += entries
    return found


def compile_all(entries: Sequence[Entry]) -> None:
    """All binaries on all CPUs, on rank 0 of the host; the others find them in Triton's cache."""
    if torch.cuda.is_available() and int(os.environ.get("LOCAL_RANK", "0")) == 0:
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
        kind = "random" if entry.variant.numerics == "ordered" else "integers"
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
            entry.trials.append(Trial(candidate, problem, launch, *made[problem, kind], outputs, wrong))


def poison(outputs: Tensors) -> None:
    for output in outputs:
        output.view(-1).view(torch.uint8).fill_(0xFF)


def wait_for_a_while(noise: random.Random) -> None:
    """Wait at random on the device and on the host, often not at all."""
    if torch.cuda.is_available() and noise.random() < 0.3:
        torch.cuda._sleep(noise.randrange(200_000))
    if noise.random() < 0.005:
        time.sleep(noise.random() * 0.002)


def launch(trial: Trial, outputs: Tensors) -> None:
    stream = torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else 0
    trial.launch(trial.inputs, outputs, stream)


def launch_once(trial: Trial, noise: random.Random) -> None:
    """Poison, wait for a while or not, launch, judge; nothing here waits for the device."""
    outputs = trial.outputs[trial.count % 2]
    poison(outputs)
    wait_for_a_while(noise)
    launch(trial, outputs)
    trial.wrong += ~trial.is_right(outputs)
    trial.count += 1


@dataclass(eq=False, slots=True)
class Graph:
    """One launch of every variant, captured in the order given; on the host they are launched anew each time."""

    trials: Sequence[Trial]
    which: int
    captured: torch.cuda.CUDAGraph | None = None

    def launch_all(self) -> None:
        """Poison all, launch all without anything between, judge all."""
        for trial in self.trials:
            poison(trial.outputs[self.which])
        for trial in self.trials:
            launch(trial, trial.outputs[self.which])
        for trial in self.trials:
            trial.wrong += ~trial.is_right(trial.outputs[self.which])

    def replay(self, noise: random.Random) -> None:
        wait_for_a_while(noise)
        (self.launch_all if self.captured is None else self.captured.replay)()
        for trial in self.trials:
            trial.count += 1


def graphs_of(order: Sequence[Entry], shuffle: random.Random, noise: random.Random) -> list[Graph]:
    """As many as have every trial; all of them are launched once before, for a capture may not be the first launch."""
    for entry in order:
        for trial in entry.trials:
            launch_once(trial, noise)
    found = []
    for number in range(max((len(entry.trials) for entry in order), default=0)):
        trials = [entry.trials[number % len(entry.trials)] for entry in order]
        found.append(Graph(shuffle.sample(trials, len(trials)), number % 2))
        if torch.cuda.is_available():
            found[-1].captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(found[-1].captured):
                found[-1].launch_all()
    return found


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
                shuffle.choice(graphs).replay(noise)
            for entry in order if not graphs else ():
                launch_once(shuffle.choice(entry.trials), noise)
            done += 1
        if communicator.device.type == "cuda":
            torch.cuda.synchronize()
        communicator.check_peers()
        wrong = torch.stack([trial.wrong for entry in order for trial in entry.trials]).sum()
        over = torch.tensor([time.monotonic() - begin > seconds or bool(wrong)], device=communicator.device).int()
        dist.all_reduce(over, dist.ReduceOp.MAX)
        if over.item():
            break
    return time.monotonic() - begin


def rows_of(communicator: Communicator, entries: Sequence[Entry], seconds: float) -> list[dict[str, Any]]:
    """One a variant, with what any rank saw."""
    devices: list[str] = [""] * communicator.world_size
    mine = str(torch.cuda.get_device_properties(communicator.device).uuid) if communicator.device.type == "cuda" else ""
    dist.all_gather_object(devices, mine)
    gpus, run_columns = len(set(filter(None, devices))), of_run(communicator.environment)
    rows = []
    for entry in entries:
        wrong = torch.tensor([sum(int(trial.wrong) for trial in entry.trials)], device=communicator.device)
        dist.all_reduce(wrong)
        reason = entry.reasons.most_common(1)[0][0] if entry.reasons and not entry.trials else ""
        rows.append(
            {
                "op": entry.variant.op,
                "variant": entry.variant.name,
                "numerics": entry.variant.numerics,
                "world_size": communicator.world_size,
                "gpus": gpus,
                "launches": sum(trial.count for trial in entry.trials),
                "wrong": int(wrong),
                "configs": len({trial.candidate for trial in entry.trials}),
                "problems": len({trial.problem for trial in entry.trials}),
                "not_run": reason,
                "seconds": round(seconds, 1),
                **run_columns,
            }
        )
    return rows


def stress(
    names: Sequence[str], launches: int, seconds: float, only: Collection[str] = (), *, graph: bool = False
) -> list[dict[str, Any]]:
    """The rows of one run of these ops, of these variants alone if some are named; torch.distributed is initialised."""
    communicator = get_communicator()
    entries = plan(communicator, names, random.Random(7), only)
    compile_all(entries)
    bind_all(communicator, entries)
    took = run(communicator, entries, launches, seconds, graph=graph)
    for entry in entries:
        for trial in entry.trials:
            if int(trial.wrong):
                sys.stderr.write(
                    f"rank {dist.get_rank()}: {int(trial.wrong)} of {trial.count} launches were wrong: "
                    f"{trial.problem} {trial.candidate}\n"
                )
    return rows_of(communicator, entries, took)


def main() -> None:
    options = {"graph": False, "launches": 300, "seconds": 1e9, "hang_s": 280.0, "csv": None}
    args = arguments(__doc__, op=[], variant=[], **options)
    faulthandler.dump_traceback_later(args.hang_s, exit=True)
    start_group()
    kernels.discover()
    names = args.op or [name for name in ops() if get_op(name).rank_of_shape < 3]
    rows = stress(names, args.launches, args.seconds, args.variant, graph=args.graph)
    if dist.get_rank() == 0:
        for row in rows:
            sys.stdout.write("{op:20} {variant:18} {launches:>7} launches, {wrong} wrong {not_run}\n".format(**row))
        if args.csv:
            append(args.csv, rows)
    wrong = sum(row["wrong"] for row in rows)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
