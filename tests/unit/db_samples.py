"""Values that the database tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any

from tunedcomm.db.records import Trial
from tunedcomm.hardware import Environment
from tunedcomm.selection.select import Catalog, Decision, choose
from tunedcomm.selection.snapshot import Row, Snapshot
from tunedcomm.spec import Candidate, Numerics, NumericsPolicy, Problem

H200 = Environment(
    gpu="NVIDIA H200",
    num_sms=132,
    compute_capability=90,
    memory_gib=141,
    fabric="nvswitch-18",
    num_links=18,
    multicast=False,
    nodes=1,
    driver="570.1",
    cuda="13.0",
    torch="2.11.0",
    triton="3.6.0",
    nccl="2.28.9",
    tunedcomm="0.1.0",
)
OLDER = replace(H200, torch="2.9.0", triton="3.5.0")
START = datetime(2026, 1, 1, tzinfo=timezone.utc)

NUMERICS: Mapping[str, Numerics] = {
    "library": "library",
    "one_shot": "ordered",
    "two_shot": "ordered",
    "lamport": "ordered",
    "atomic": "unordered",
}


def problem(message_bytes: int = 4096, **changes: Any) -> Problem:
    """A bfloat16 all_reduce over 4 ranks."""
    return replace(Problem("all_reduce", (message_bytes // 2,), "bfloat16", 4), **changes)


def trial(variant: str = "one_shot", latency_us: float | None = 5.0, **changes: Any) -> Trial:
    """An ok trial, or what `changes` make of it; `after` moves its time by so many seconds."""
    after = changes.pop("after", 0)
    values: dict[str, Any] = {
        "problem": problem(),
        "environment": H200,
        "variant": variant,
        "numerics": NUMERICS.get(variant, "ordered"),
        "source_hash": "current",
        "config": {} if variant == "library" else {"num_blocks": 4},
        "status": "ok",
        "latency_p50_us": latency_us,
        "baseline_p50_us": None if latency_us is None else 10.0,
        "created_at": START + timedelta(seconds=after),
    }
    return Trial(**{**values, **changes})


def candidate(variant: str, num_blocks: int = 4) -> Candidate:
    return Candidate.of("all_reduce", variant, {} if variant == "library" else {"num_blocks": num_blocks})


def row(variant: str, latency_us: float, message_bytes: int = 4096, **changes: Any) -> Row:
    """A final of the user layer; `num_blocks` goes into the config, `like` into the problem."""
    like = changes.pop("like", {})
    values: dict[str, Any] = {
        "problem": problem(message_bytes, **like),
        "candidate": candidate(variant, changes.pop("num_blocks", 4)),
        "source_hash": "current",
        "environment": H200,
        "latency_p50_us": latency_us,
        "baseline_p50_us": 10.0,
        "samples": 1000,
        "final": True,
        "trial_id": 7,
    }
    return Row(**{**values, **changes})


def snapshot(rows: Iterable[Row], **changes: Any) -> Snapshot:
    return Snapshot(environment=H200, world_size=4, rows=tuple(rows), **changes)


@dataclass(frozen=True)
class SampleCatalog(Catalog):
    """The sample variants; rows of source `current` are current."""

    feasible: Callable[[Candidate], str | None] = lambda candidate: None
    blocks_of: Callable[[Candidate], int] = lambda candidate: -1
    rounds_of: Callable[[Problem, Candidate], int] = lambda problem, candidate: 0
    no_kernel: str | None = None
    by_rule_of_thumb: Candidate | None = None

    def checker(self, candidate: Candidate, *, by_name: bool) -> Callable[[Problem], str | None]:
        return lambda problem: self.feasible(candidate)

    def source_hash(self, op: str, variant: str) -> str | None:
        return "current" if variant in NUMERICS else None

    def numerics(self, op: str, variant: str) -> Numerics | None:
        return NUMERICS.get(variant)

    def num_blocks(self, problem: Problem, candidate: Candidate) -> int:
        return self.blocks_of(candidate)

    def num_rounds(self, problem: Problem, candidate: Candidate) -> int:
        return self.rounds_of(problem, candidate)

    def why_no_kernel(self, problem: Problem, policy: NumericsPolicy) -> str | None:
        return self.no_kernel

    def default_beating_library(self, problem: Problem, max_sms: int | None = None) -> Candidate | None:
        return self.by_rule_of_thumb


def decide(
    rows: Iterable[Row] | Snapshot,
    asked: Problem | None = None,
    *,
    policy: NumericsPolicy = "default",
    forced: Candidate | None = None,
    max_sms: int | None = None,
    **known: Any,
) -> Decision:
    """`choose` with the sample variants; `known` goes into the catalog."""
    return choose(
        rows if isinstance(rows, Snapshot) else snapshot(rows),
        problem() if asked is None else asked,
        SampleCatalog(**known),
        policy=policy,
        forced=forced,
        max_sms=max_sms,
    )
