"""Tuning in a running job: the ranks of a process group are the gang, and rank 0 decides for all.

No supervisor can kill this gang, so three rules replace it:

- Trials run in memory of their own (`Communicator.with_own_memory`), where a wait for a peer ends after
  `PEER_TIMEOUT_S`. A candidate that hangs, or raises on one rank, ends on all ranks. The memory is then made anew, and
  the group's own calls are not affected.
- Votes and commands go through a gloo group that is made for the tuning and destroyed after it.
- Only variants of this package are tried unless the caller asks for others, whose waits may have no bound.

What searches begin with is compiled before the clock of the budget runs (`compile_together`). The search is short, and
breadth first: every problem gets one candidate besides the library, the most wanted problem first, before any gets a
second one. The time left is then shared out evenly. A search begins with guesses from all that is known, goes on among
the neighbours of its best candidate, and is followed by its own finals while its tensors exist.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

from tunedcomm.db.values import LOST
from tunedcomm.dispatch.communicator import Communicator
from tunedcomm.dispatch.launches import no_intercept
from tunedcomm.kernels.common.launch import CompileRequest, is_compiled, load
from tunedcomm.spec import Candidate, Limits, NumericsPolicy, Problem, get_op, get_variant
from tunedcomm.state import clean_process
from tunedcomm.symm.nodes import make_subgroup
from tunedcomm.tuner.gang.group import Gang
from tunedcomm.tuner.gang.protocol import Command, Settings, TrialResult
from tunedcomm.tuner.measure.compile_pool import CompilePool, num_workers
from tunedcomm.tuner.measure.correctness import odd_problems
from tunedcomm.tuner.measure.trial import TrialRunner
from tunedcomm.tuner.search.coordinator import Coordinator
from tunedcomm.tuner.search.knowledge import Knowledge, is_library
from tunedcomm.tuner.search.strategy import Strategy
from tunedcomm.tuner.search.study import LocalSearch, default_candidates

# Longest wait of a trial's launch for a peer.
PEER_TIMEOUT_S = 2.0
# Finalists of a problem besides the library.
_FINALISTS = 3
# A candidate takes part in the finals if it took at most this many times as long as the best one.
_CLOSE = {"cuda": 1.05, "host": 1.3}
# A variant that took this many times as long as the best one near a size is not tried there.
_FAR_BEHIND = 3.0
# Slowdown assumed for a variant not measured near this size. "Near" is within a factor of `_NEAR`.
_UNKNOWN = 1.5
_NEAR = 8.0
_ROUND_BUDGET_US = 100_000.0
# Larger CPU tensors are checked at their own size alone: there the references take the time, not the launches.
_FULL_CHECK_BYTES = {"cuda": math.inf, "host": 2 << 20}
# The estimate of a first trial's time is constant up to this size, and grows with the size beyond.
_SMALL_BYTES = {"cuda": 64 << 20, "host": 1 << 20}
# Processes that compile on a host, at most, and the seconds between two reports of their progress.
_MOST_WORKERS = 8
_REPORT_S = 0.25


def job_settings(limits: Limits, problems: Collection[Problem], policy: NumericsPolicy) -> Settings:
    """Settings of a short search: few samples, and no second chance for a candidate that hung."""
    on_gpu = limits.backend == "cuda"
    return Settings(
        backend=limits.backend,
        world_size=next(iter(problems)).world_size,
        trials=64,
        policy=policy,
        reach=1.3 if on_gpu else 1.6,
        first_rounds=2 if on_gpu else 3,
        more_rounds=6 if on_gpu else 8,
        final_rounds=12,
        for_kernels=on_gpu,
        round_budget_us=_ROUND_BUDGET_US,
        in_job=True,
        search_share=0.95,
        full_check_bytes=_FULL_CHECK_BYTES[limits.backend],
        peer_timeout_s=PEER_TIMEOUT_S,
        failures_per_variant=1,
    )


def is_own(candidate: Candidate) -> bool:
    """True if this package brings the variant."""
    bind = get_variant(candidate.op, candidate.variant).bind
    owner = getattr(bind, "__self__", None)
    module = getattr(bind, "__module__", "") if owner is None else type(owner).__module__
    return str(module).startswith("tunedcomm.")


class JobStrategy(Strategy):
    """The answers of a short search: problems in the order of `guesses`, each with its own finals.

    Args:
        settings: of the search.
        guesses: each problem's candidates to try right after the library; the most wanted problem first.
        plugins: try variants of other packages, too.
    """

    search = LocalSearch

    def __init__(
        self, settings: Settings, guesses: Mapping[Problem, Sequence[Candidate]], *, plugins: bool = False
    ) -> None:
        super().__init__(settings)
        self._guesses, self._plugins = guesses, plugins
        self._first_s: dict[Problem, float] = {}  # duration of each problem's first trial

    def families(self, problems: Iterable[Problem]) -> list[list[Problem]]:
        return [[problem] for problem in problems]

    def space(self, problem: Problem, known: Knowledge) -> list[Candidate]:
        return [c for c in super().space(problem, known) if self._plugins or is_library(c) or is_own(c)]

    def seeds(self, problem: Problem, known: Knowledge, searched: Collection[Problem]) -> list[Candidate]:
        """Guesses, the winner of the nearest size measured, and defaults in the order of their variants' times near."""
        near = _near(problem, (p for p in self._guesses if p != problem and known.fastest(p, 1)))
        behind = _behind(near, known)

        def slowdown(candidate: Candidate) -> float:
            return behind.get(candidate.variant, _UNKNOWN)

        usual = default_candidates(problem, known.limits)
        defaults = sorted((c for c in usual if slowdown(c) <= _FAR_BEHIND), key=slowdown)
        winners = [c for other in near[:1] for c in known.fastest(other, 1, self._settings.policy)]
        return [*self._guesses[problem], *defaults[:1], *known.feasible(problem, winners), *defaults[1:]]

    def first_binaries(self, known: Knowledge) -> dict[CompileRequest, None]:
        """List the binaries of the searches' first candidates, one candidate of each problem in turn."""
        turns = itertools.zip_longest(*(self._first(problem, known) for problem in self._guesses))
        found: dict[CompileRequest, None] = {}
        for problem, candidate in (pair for turn in turns for pair in turn if pair is not None):
            variant = get_variant(candidate.op, candidate.variant)
            for shape in (problem, *odd_problems(get_op(problem.op), problem)):  # checks launch at the odd shapes
                found |= dict.fromkeys(variant.compile_requests(shape, candidate.config_dict))
        return found

    def _first(self, problem: Problem, known: Knowledge) -> list[tuple[Problem, Candidate]]:
        space = set(self.space(problem, known))
        return [(problem, c) for c in dict.fromkeys(self.seeds(problem, known, ())) if c in space]

    def finalists(self, family: Sequence[Problem], known: Knowledge) -> Iterator[tuple[Problem, list[Candidate]]]:
        """The best few candidates, where they are too close to tell apart by one look."""
        for problem in family:
            times = known.settled(problem)
            best = known.fastest(problem, _FINALISTS, self._settings.policy)
            close = [c for c in best if (times[c] or 0.0) <= _CLOSE[self._settings.backend] * (times[best[0]] or 0.0)]
            yield problem, close if len(close) > 1 else []  # the library is measured beside each of them

    def may_begin(self, problem: Problem, seconds_left: float) -> bool:
        """True if the first trial of the problem fits into the time left, estimated from the largest first trial."""

        def size(other: Problem) -> int:
            return get_op(other.op).message_bytes(other)

        if not self._first_s:
            return seconds_left >= 0.0
        largest, small = max(self._first_s, key=size), _SMALL_BYTES[self._settings.backend]
        return self._first_s[largest] * max(1.0, size(problem) / max(size(largest), small)) <= seconds_left

    def learn_cost(self, problem: Problem, seconds: float) -> None:
        self._first_s.setdefault(problem, seconds)


def _near(problem: Problem, measured: Iterable[Problem]) -> list[Problem]:
    """Measured problems of the family that are at most `_NEAR` times smaller or larger, the nearest first."""

    def distance(other: Problem) -> float:
        sizes = [get_op(p.op).message_bytes(p) + 1 for p in (problem, other)]
        return max(sizes) / min(sizes)

    return sorted((p for p in measured if p.family == problem.family and distance(p) <= _NEAR), key=distance)


def _behind(near: Iterable[Problem], known: Knowledge) -> dict[str, float]:
    """Variant to its time over the best variant's time, at the nearest of these problems where it ran."""
    found: dict[str, float] = {}
    for other in near:
        times: dict[str, float] = {}
        for trial in known.trials(other):
            if trial.latency_p50_us is not None and not is_library(trial.candidate):
                times[trial.variant] = min(trial.latency_p50_us, times.get(trial.variant, math.inf))
        found = {variant: us / min(times.values()) for variant, us in times.items()} | found
    return found


@contextlib.contextmanager
def control_group(communicator: Communicator) -> Iterator[dist.ProcessGroup]:
    """A gloo group of the communicator's ranks, for votes and commands; collective. Nothing is intercepted inside."""
    name = communicator.exchange(f"tunedcomm-{uuid.uuid4().hex}")[0]
    control = make_subgroup(communicator.group, range(communicator.world_size), name, "cpu")
    try:
        with no_intercept():
            yield control
    finally:
        dist.destroy_process_group(control)


def compile_together(
    communicator: Communicator,
    requests: Iterable[CompileRequest],
    compute_capability: int,
    seconds: float,
    on_progress: Callable[[int, int], None] = lambda done, wanted: None,
) -> None:
    """Compile binaries into the Triton caches of all ranks; collective over the group.

    The first rank of each host compiles for all, and a rank that does not see that rank's cache directory for itself.
    The others wait in a group of their own, to which no peer time-out applies.

    Args:
        requests: rank 0's, the most wanted first.
        seconds: rank 0's time limit. A binary that is not compiled then is compiled when it is bound. What is compiled
            is loaded on every rank, for Triton builds a C launcher at the first load.
        on_progress: called on ranks that compile, with the number of binaries done and wanted.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    target, folder = GPUTarget("cuda", compute_capability, 32), Path(triton.knobs.cache.dir)
    node = communicator.nodes[communicator.rank]
    first = communicator.nodes.index(node)
    with control_group(communicator) as control:
        gang = Gang(control, communicator)
        requests, seconds = gang.gather((list(requests), seconds))[0]
        end_s = time.monotonic() + seconds
        token = folder / f"{gang.gather(uuid.uuid4().hex)[first]}.tunedcomm"
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if gang.rank == first:
                token.touch()
        gang.barrier()
        wanted: list[CompileRequest] = []
        if (gang.rank == first or not token.exists()) and os.access(folder, os.W_OK):
            wanted = [request for request in requests if not is_compiled(request, target)]
        everyone = zip(gang.gather(bool(wanted)), communicator.nodes, strict=True)
        if wanted and seconds > 0:
            share = max(1, num_workers(_MOST_WORKERS) // sum(compiles for compiles, place in everyone if place == node))
            with contextlib.closing(CompilePool(share)) as pool:
                pool.submit(wanted, compute_capability)
                while not pool.drain(_REPORT_S) and time.monotonic() < end_s:
                    on_progress(len(pool.outcomes()), len(wanted))
        gang.barrier()
        if gang.rank == first:
            token.unlink(missing_ok=True)
        for request in requests if communicator.device.type == "cuda" else ():
            if time.monotonic() < end_s and is_compiled(request, target):
                with contextlib.suppress(Exception):  # its trial tells
                    load(request, communicator.device)


def run_in_job(
    communicator: Communicator,
    settings: Settings,
    coordinator: Coordinator | None,
    on_known: Callable[[Knowledge], None] = lambda known: None,
    on_result: Callable[[Command, TrialResult], None] = lambda command, result: None,
) -> None:
    """Run the trials that rank 0's coordinator asks for; collective over the group, outside of any capture.

    Args:
        communicator: of the group; its memory and plans are not touched.
        settings: the same on every rank.
        coordinator: rank 0's; None on the other ranks.
        on_known: called on rank 0 before the first trial.
        on_result: called on rank 0 with every trial that ended.

    Raises:
        RuntimeError: a rank is gone, or the library does not run.
    """
    runner: TrialRunner | None = None
    with control_group(communicator) as control, clean_process():
        while True:
            if runner is None:
                own = communicator.with_own_memory(PEER_TIMEOUT_S, for_kernels=settings.for_kernels)
                gang = Gang(control, own)
                gang.synchronize()  # the program's kernels, which take room on the GPU, must be done
                gang.barrier()
                runner = TrialRunner(gang, settings)
                if coordinator is not None:
                    known = coordinator.gang_ready(0, communicator.environment, gang.communicator.limits)
                    if known is not None:
                        on_known(known)
            command = gang.gather(Command(kind="wait") if coordinator is None else coordinator.next(0))[0]
            result = runner.run(command) if command.kind == "trial" else None
            if coordinator is not None and result is not None:
                coordinator.learn(0, result)
                on_result(command, result)
            if result is None or result.status in LOST:
                gang.synchronize()
                gang.barrier()  # no rank may free memory that a peer's launch still uses
                runner.close()
                runner = None
            if result is None:
                return
