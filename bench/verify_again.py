"""Verdicts of `tunedcomm db verify` on winners that were timed twice, minutes apart, for docs/shipping.md.

python bench/verify_again.py --csv bench/results/replay/verify_again_h200.csv

Needs no GPU: tests/data holds what was measured then and now, on 2 H200 GPUs whose host had become faster in between.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rows import ROOT, arguments, read_trials, show

from tunedcomm import kernels
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.records import Trial
from tunedcomm.db.store import Database
from tunedcomm.dispatch.dispatcher import source_hash_of
from tunedcomm.symm.layout import limits_for
from tunedcomm.tuner.verify import Winner, judge, stored_winners

TOLERANCE = 0.1
# How much slower all kernels but the library's are made, to see whether that is noticed.
SLOWER = {"graph": 1.2, "eager": 2.0}
# What a ratio to the library may lose by itself before it alone would count as drift.
DRIFT = 1.15
TIMES = ("latency_p10_us", "latency_p50_us", "latency_p90_us")


def recorded(name: str) -> list[Trial]:
    """Measured once; as if it had been with the kernels of today."""
    found = read_trials(ROOT / "tests" / "data" / f"verify_h200_x2_{name}.jsonl.gz")
    return [replace(r, final=True, source_hash=source_hash_of("all_reduce", r.variant) or "") for r in found]


def winners_of(records: Sequence[Trial]) -> list[Winner]:
    """The winners that verify finds in a database of these."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "then.db"
        with Database.open(path, create=True) as database:
            database.record(records)
        here = records[0].environment
        snapshot = load_snapshot(here, 2, layers=[Layer("user", str(path))], strict=True)
        found = stored_winners(snapshot, limits_for(here, 2), source_hash_of)
    return [winner for stored in found.values() for winner in stored]


def slower(record: Trial, factor: float) -> Trial:
    return replace(record, **{name: (getattr(record, name) or 0.0) * factor for name in TIMES})


def row_of(mode: str, then: Sequence[Trial], now: Sequence[Trial]) -> dict[str, Any]:
    """The figures of one call mode."""
    winners = [winner for winner in winners_of(then) if winner.problem.mode == mode]
    before, after = ({(r.problem, r.candidate): r for r in records} for records in (then, now))
    both = [(before[key], after[key]) for w in winners if (key := (w.problem, w.candidate)) in before and key in after]
    own = [(b.latency_p50_us, a.latency_p50_us) for b, a in both]
    library = [(b.baseline_p50_us, a.baseline_p50_us) for b, a in both]
    ratios = [[a / b for b, a in pairs if a and b] for pairs in (own, library)]
    judged = [judge(winner, now, tolerance=TOLERANCE) for winner in winners]
    lost = [found.ratio / found.winner.ratio for found in judged if found.ratio and found.winner.ratio]
    slow = [record if record.variant == "library" else slower(record, SLOWER[mode]) for record in now]
    return {
        "world_size": 2,
        "mode": mode,
        "winners": len(winners),
        "own_min": f"{min(ratios[0]):.2f}",
        "own_max": f"{max(ratios[0]):.2f}",
        "library_min": f"{min(ratios[1]):.2f}",
        "library_max": f"{max(ratios[1]):.2f}",
        "held": sum(not found.is_wrong for found in judged),
        "drifted_by_ratio_alone": sum(ratio > DRIFT for ratio in lost),
        "made_slower": SLOWER[mode],
        "slower_found": sum(judge(winner, slow, tolerance=TOLERANCE).is_wrong for winner in winners),
        "gpu": now[0].environment.gpu,
        "command": "bench/verify_again.py",
    }


def main() -> None:
    args = arguments(__doc__, csv=None)
    kernels.discover()
    then, now = recorded("then"), recorded("now")
    show([row_of(mode, then, now) for mode in SLOWER], args.csv)


if __name__ == "__main__":
    main()
