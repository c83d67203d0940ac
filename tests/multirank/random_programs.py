"""Random programs of calls, interruptions, program state and releases, against an oracle.

    python tests/multirank/random_programs.py --programs 300 --first 0

A program is a list of steps that a seed gives, the same on every rank: calls of random ops, sizes and dtypes on two
groups, in random program state (default dtype, inference mode, numerics), and releases by all ranks. On one rank a call
may be interrupted anywhere from its entry to its return, its group's set-up included. Every rank goes on with the
program whatever its calls raise; ranks meet only at releases. The oracle knows which calls never began: the interrupted
rank makes such a call again.

Right is: every call before the first interruption of its group gives the exact result on every rank; that call gives it
or an error; all later ones are errors on every rank, until the group is released. Nothing is wrong, nothing hangs.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import tunedcomm

PACKAGE = str(Path(tunedcomm.__file__).parent)
ENVIRONMENT = {
    "TUNEDCOMM_WORKSPACE_MIB": "1",
    "TUNEDCOMM_DB": "/proc/none/tuned.db",
    "TUNEDCOMM_MISS_LOG": "0",
    "TUNEDCOMM_PEER_TIMEOUT_S": "60",
}
NUM_STEPS = 20
SLOW_S = 30.0  # a call that takes longer has waited for a peer that never came
SIZES = (1, 7, 600, 5000, 60_000, 700_000)
DTYPES = ("float32", "bfloat16", "float64", "int32")
STATES = ("", "", "float16 by default", "inference mode", "ordered")
NUM_GROUPS = 2


class Interrupt(KeyboardInterrupt):
    """What a signal handler raises."""


class Step(NamedTuple):
    """One step of a program.

    Attributes:
        op: `release`, or an op.
        group: which of the two.
        victim: the rank that is interrupted, or −1.
        line: of the package that is interrupted, counted from the call's entry; or 0 for a signal.
        delay_s: until that signal.
    """

    op: str
    group: int
    numel: int = 0
    dtype: str = ""
    state: str = ""
    victim: int = -1
    line: int = 0
    delay_s: float = 0.0


def program_of(seed: int, world_size: int) -> list[Step]:
    """The steps of a program."""
    draw, steps = random.Random(seed), []
    for _ in range(NUM_STEPS):
        group = draw.randrange(NUM_GROUPS)
        if draw.random() < 0.15:
            steps.append(Step("release", group))
            continue
        op = draw.choice(("all_reduce", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"))
        step = Step(op, group, draw.choice(SIZES), draw.choice(DTYPES), draw.choice(STATES))
        if draw.random() < 0.15:
            line = round(2 * 1000 ** draw.random()) if draw.random() < 0.7 else 0
            step = step._replace(victim=draw.randrange(world_size), line=line, delay_s=0.03 * draw.random())
        steps.append(step)
    return steps


def call_and_result(step: Step, rank: int, world_size: int, group: Any) -> tuple[Callable[[], torch.Tensor], Any]:
    """The call, and the exact result."""
    kind = {"dtype": getattr(torch, step.dtype), "device": "cpu"}
    part = torch.full((step.numel,), rank + 1.0, **kind)
    total = float(sum(range(1, world_size + 1)))
    of_ranks = torch.arange(1, world_size + 1, **kind).repeat_interleave(step.numel)
    options: dict[str, Any] = {"group": group}
    op = getattr(tunedcomm, step.op)  # the first look-up of a name imports its module, which is no part of a call
    if step.op in ("all_reduce", "reduce_scatter"):
        options |= {"numerics": "ordered"} if step.state == "ordered" else {}
        x = part if step.op == "all_reduce" else part.repeat(world_size)
        return lambda: op(x, **options), torch.full((step.numel,), total, **kind)
    x = part if step.op == "all_gather" else part.repeat(world_size)
    return lambda: op(x, **options), of_ranks


@contextlib.contextmanager
def in_state(state: str) -> Iterator[None]:
    """A block in a program state."""
    before = torch.get_default_dtype()
    if state == "float16 by default":
        torch.set_default_dtype(torch.float16)
    try:
        with torch.inference_mode(state == "inference mode"):
            yield
    finally:
        torch.set_default_dtype(before)


def began(error: BaseException) -> bool:
    """True if an interruption has come after the entry of an op: where it comes at its first line nothing has run."""
    frames, frame = [], error.__traceback__
    while frame is not None:
        frames.append((frame.tb_frame.f_code, frame.tb_lineno))
        frame = frame.tb_next
    inside = [(code, line) for code, line in frames if code.co_filename.startswith(PACKAGE)]
    return len(inside) > 1 or (len(inside) == 1 and inside[0][1] != inside[0][0].co_firstlineno)


@contextlib.contextmanager
def interrupted(step: Step) -> Iterator[None]:
    """A block that is interrupted as the step says, if it is in the package by then."""
    count = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith((PACKAGE, "<tunedcomm")):
            return None
        count += event == "line"
        if count == step.line:
            raise Interrupt
        return trace

    def handle(number: int, frame: Any) -> None:
        while frame is not None:
            if frame.f_code.co_filename.startswith(PACKAGE):
                raise Interrupt
            frame = frame.f_back

    before = signal.signal(signal.SIGALRM, handle)
    try:
        if step.line:
            sys.settrace(trace)
        else:
            signal.setitimer(signal.ITIMER_REAL, max(step.delay_s, 1e-5))
        yield
    finally:
        sys.settrace(None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome_of(step: Step, rank: int, world_size: int, group: Any) -> str:
    """What the call gave on this rank: `right`, `WRONG`, `interrupted`, or `refused`."""
    call, expected = call_and_result(step, rank, world_size, group)
    begin, found = time.monotonic(), None
    try:
        with in_state(step.state):
            if step.victim == rank:
                try:
                    with interrupted(step):
                        found = call()
                except Interrupt as error:
                    if began(error):
                        return "interrupted"
            if found is None:
                found = call()
    except tunedcomm.PeerTimeoutError as error:
        late = time.monotonic() - begin > SLOW_S
        return f"TOO LATE: {error}" if late else "refused"
    except Exception as error:  # noqa: BLE001 - the oracle says so
        return f"OTHER ERROR: {type(error).__name__}: {error}"
    return "right" if torch.equal(found, expected) else "WRONG"


def run_program(rank: int, world_size: int, first: int, count: int) -> list[list[str]]:
    """The outcomes of some programs on this rank; a body of `harness.run_ranks`."""
    everything = []
    for seed in range(first, first + count):
        groups = [dist.new_group() for _ in range(NUM_GROUPS)]
        outcomes = []
        for step in program_of(seed, world_size):
            if step.op == "release":
                dist.barrier()
                tunedcomm.release_communicator(groups[step.group])
                outcomes.append("released")
            else:
                outcomes.append(outcome_of(step, rank, world_size, groups[step.group]))
        everything.append(outcomes)
        dist.barrier()
        for group in groups:
            tunedcomm.release_communicator(group)
            dist.destroy_process_group(group)
    return everything


def judge(seed: int, world_size: int, by_rank: list[list[str]]) -> tuple[list[str], Counter[str]]:
    """The faults of a program's outcomes, and how often calls ended how."""
    faults, counts = [], Counter[str]()
    ended = [False] * NUM_GROUPS
    for number, step in enumerate(program_of(seed, world_size)):
        found = [outcomes[number] for outcomes in by_rank]
        if step.op == "release":
            ended[step.group] = False
            continue
        counts.update(found)
        allowed = {"refused", "interrupted"} if ended[step.group] else {"right"}
        if "interrupted" in found and not ended[step.group]:
            ended[step.group], allowed = True, {"right", "refused", "interrupted"}
        if not set(found) <= allowed:
            faults.append(f"program {seed} of {world_size} ranks, step {number} {step}: {found}, not {allowed}")
    return faults, counts


def run(programs: int, first: int, *, timeout: float = 120.0, batch: int = 10) -> tuple[list[str], Counter[str]]:
    """Run programs in turn on 2 and 3 ranks."""
    from harness import RankError, run_ranks

    faults: list[str] = []
    counts: Counter[str] = Counter()
    for begin in range(first, first + programs, batch):
        size, world_size = min(batch, first + programs - begin), 2 + (begin // batch) % 2
        try:
            found = run_ranks(
                world_size, "random_programs:run_program", begin, size, env=ENVIRONMENT, timeout=timeout + 20 * size
            )
        except RankError as error:
            faults.append(f"programs {begin} to {begin + size - 1} of {world_size} ranks: {error}")
            continue
        for number in range(size):
            new, more = judge(begin + number, world_size, [outcomes[number] for outcomes in found])
            faults += new
            counts += more
    return faults, counts


def main() -> int:
    """Run from the command line; 1 if a program had a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    asked = parser.parse_args()
    faults, counts = run(asked.programs, asked.first)
    print("\n".join(faults))
    print(f"{asked.programs} programs from {asked.first} on: {len(faults)} faults; calls: {dict(counts)}")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
