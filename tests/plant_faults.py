"""Score the tests: plant small faults one by one and see which are caught.

    python tests/plant_faults.py [--only NAME …] [--tree CHECKOUT] [--csv FILE]

Each fault is one edit of the package's text, found wherever it stands, so that files may move. A copy of the checkout
gets the edit and runs the tests of the fault's area, as `make test` would; a fault that no test notices is `missed`.
A fault whose text is not there is `gone`: write it anew for the new code. Exit status: 0 if every fault was caught.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
AREAS = {
    "selection": ["unit/test_selection_*.py", "unit/test_growth.py", "unit/test_shipped.py"],
    "dispatch": [
        "multirank/test_dispatch.py", "multirank/test_agreement.py", "multirank/test_checks.py",
        "multirank/test_communicator.py", "multirank/test_lost_peer.py", "multirank/test_bad_input.py",
        "unit/test_db_misses.py",
    ],
    "db": ["unit/test_db_*.py"],
    "tuner": ["unit/test_tuner_*.py", "multirank/test_tuner_faults.py"],
    "ops": [
        "multirank/test_bad_input.py", "multirank/test_fast_calls.py", "multirank/test_dispatch.py",
        "multirank/test_gemm_calls.py", "multirank/test_all_reduce_rms_norm.py", "multirank/test_all_to_all.py",
        "multirank/test_operators.py", "multirank/test_autograd.py", "multirank/test_gather_scatter.py",
    ],
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """One edit of a text that the package holds exactly once."""

    area: str
    name: str
    text: str
    replacement: str


FAULTS = [
    Fault("selection", "noise_ignores_samples", "spread / math.sqrt(row.samples)", "spread / row.samples"),
    Fault("selection", "score_inverted", "/ math.pow(own_us, exponent) *", "* math.pow(own_us, exponent) /"),
    Fault("selection", "disturbed_rows_count", "own_us > _DISTURBED * baseline_us", "own_us < 0 * baseline_us"),
    Fault("selection", "layer_before_drift", "row.drift, row.layer_rank)", "row.layer_rank, row.drift)"),
    Fault("selection", "plain_answered_by_symmetric", 'kinds.append("plain")', 'kinds.append("symmetric")'),
    Fault("selection", "stale_rows_count", "(row.candidate) == row.source_hash", "(row.candidate) is not None"),
    Fault("selection", "max_sms_ignored", "if 0 <= sms <= max_sms:", "if True:"),
    Fault(
        "selection",
        "interpolation_swapped",
        "math.exp((1 - weight) * low + weight * high)",
        "math.exp(weight * low + (1 - weight) * high)",
    ),
    Fault("selection", "bound_from_below_lost", "(self.low or 0.0) * growth", "(self.low or 0.0)"),
    Fault("selection", "numerics_policy_ignored", "if not admits(self.policy, numerics):", "if numerics is None:"),
    Fault(
        "dispatch", "mode_off_ignored", 'if name is None and mode == "off":', 'if name is None and mode == "offline":'
    ),
    Fault("dispatch", "mode_force_ignored", '== "force" and not', '== "forced" and not'),
    Fault("dispatch", "nan_unseen", "if found := sum(int(_count", "if found := 0 * sum(int(_count"),
    Fault("dispatch", "misses_by_every_rank", "if communicator.rank != 0 or (noted", "if (noted"),
    Fault("dispatch", "misses_counted_twice", "counter.count += 1", "counter.count += 2"),
    Fault(
        "dispatch",
        "others_failure_unheard",
        "for rank, (_, text) in enumerate(everyone):\n        if text:",
        "for rank, (_, text) in enumerate(everyone):\n        if not text and text:",
    ),
    Fault("dispatch", "settings_not_compared", "not in other or first[name] != other[name]:", "not in other:"),
    Fault("dispatch", "forced_variant_unchecked", ":= check_candidate(problem, candidate, limits):", ":= None:"),
    Fault("dispatch", "policy_unchecked", "policy is not None and policy not in settings.POLICIES:", "policy in ():"),
    Fault("dispatch", "plans_survive_force", "op] = (variant, clean)\n    _forget_plans()", "op] = (variant, clean)"),
    Fault("db", "newest_row_lost", "return (row.created_at, *content)", "return content"),
    Fault("db", "pins_of_other_world_sizes", "pins if pin.problem.world_size == world_size]", "pins if world_size]"),
    Fault("db", "failures_forgotten", 'if failure[0] >= good.get(place, "") and', 'if failure[0] > "z" and'),
    Fault(
        "db",
        "manifest_not_compared",
        "if content != {name: stored[name] for name in content}:",
        'if content["num_bytes"] != stored["num_bytes"]:',
    ),
    Fault("db", "status_unchecked", 'check_one_of(status, STATUSES, "status")\n    if status ==', "if status =="),
    Fault("db", "absurd_latency_taken", "and LEAST_US <= value <= MOST_US", "and -1e30 <= value <= 1e30"),
    Fault("db", "last_row_read_again", "TrialRow.id > after_id", "TrialRow.id >= after_id"),
    Fault("db", "pins_pile_up", "            _remove_pins(connection, problem, environment)\n", "\n"),
    Fault(
        "db",
        "config_not_flat",
        "isinstance(axis, str) and isinstance(value, (bool, int, str)) for",
        "value is not None for",
    ),
    Fault("db", "other_ops_variant_taken", "!= problem.op:\n        raise", "is None:\n        raise"),
    Fault("tuner", "sentinel_is_zero", 'tensor.fill_(float("nan") if', "tensor.fill_(0.0 if"),
    Fault("tuner", "odd_sizes_unchecked", "(numel - 1, numel + 3) if n > 0", "() if n > 0"),
    Fault("tuner", "bits_not_compared", "due = case.bits if ordered else None", "due = None"),
    Fault("tuner", "tolerance_ignored", "if not error_value <= tolerance:", "if error_value < 0:"),
    Fault("tuner", "inputs_may_change", "all(map(_same_bits, inputs, case.inputs))", "bool(inputs) or True"),
    Fault("tuner", "order_never_changes", "[(round_index + sign * offset) % count for", "[offset % count for"),
    Fault("tuner", "arena_left_dirty", ":= workspace.rearm(problem.mode))", ":= workspace.rearm(problem.mode)) < 0"),
    Fault("tuner", "hang_is_a_crash", "None, Trouble.HUNG, str(error)", "None, Trouble.CRASHED, str(error)"),
    Fault("ops", "overlap_unseen", "and out_low < high and low < out_high:", "and out_low < low and high < low:"),
    Fault("ops", "avg_of_integers", '"avg" and not x.is_floating_point()', '"average" and not x.is_floating_point()'),
    Fault("ops", "expanded_out_taken", "any(stride == 0 and size > 1 for size, stride in", "any(False for _ in"),
    Fault("ops", "negative_dim_shifted", "return dim % count", "return abs(dim) % count"),
    Fault("ops", "gradients_lost", "(recording and tensor.requires_grad) or type(tensor)", "type(tensor)"),
    Fault("ops", "strides_ignored", "tensor.is_contiguous() and not tensor.is_neg()", "not tensor.is_neg()"),
]


def planted(tree: Path, found: Fault) -> Path | None:
    """The file that holds the fault now, or None where its text is nowhere."""
    sources = {path: path.read_text(encoding="utf-8") for path in (tree / "tunedcomm").rglob("*.py")}
    places = [path for path, source in sources.items() for _ in range(source.count(found.text))]
    if len(places) != 1:
        return None
    places[0].write_text(sources[places[0]].replace(found.text, found.replacement), encoding="utf-8")
    return places[0]


def score(tree: Path, found: Fault, timeout_s: float) -> tuple[str, str, float]:
    """`caught`, `missed` or `gone`; the test that noticed; seconds."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        Path(folder).chmod(0o755)  # some tests give up root's rights
        copy = Path(folder) / "tree"
        shutil.copytree(tree, copy, ignore=shutil.ignore_patterns(".git", ".venv*", "__pycache__", "build", ".*_cache"))
        if planted(copy, found) is None:
            return "gone", "", 0.0
        files = sorted({str(path) for pattern in AREAS[found.area] for path in (copy / "tests").glob(pattern)})
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *files]
        search = os.pathsep.join([str(copy), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        environment = os.environ | {"PYTHONPATH": search}
        try:
            done = subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired:
            return "caught", "time limit", time.monotonic() - begin
    failed = re.search(r"^(?:FAILED|ERROR) \S*?tests/(\S+)", done.stdout, re.M)
    verdict = "missed" if done.returncode == 0 else "caught"
    return verdict, failed[1] if failed else "", time.monotonic() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="names of faults, or of areas")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout whose tests are scored")
    parser.add_argument("--csv", type=Path, help="where to write the table")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds a fault; a longer run counts as caught")
    parser.add_argument("--list", action="store_true", help="say which faults are gone, and run nothing")
    asked = parser.parse_args()
    chosen = [f for f in FAULTS if not asked.only or f.name in asked.only or f.area in asked.only]
    lines = []
    for found in chosen:
        if asked.list:
            with tempfile.TemporaryDirectory() as folder:
                shutil.copytree(asked.tree / "tunedcomm", Path(folder) / "tunedcomm")
                place = planted(Path(folder), found)
                print(found.area, found.name, place.relative_to(folder) if place else "GONE")
            continue
        verdict, test, seconds = score(asked.tree, found, asked.timeout)
        lines.append({"area": found.area, "fault": found.name, "verdict": verdict, "test": test})
        print(f"{found.area:10} {found.name:32} {verdict:7} {seconds:6.0f} s  {test}", flush=True)
    if asked.csv and lines:
        with asked.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["area", "fault", "verdict", "test"])
            writer.writeheader()
            writer.writerows(lines)
    counts = {verdict: sum(line["verdict"] == verdict for line in lines) for verdict in ("caught", "missed", "gone")}
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return int(counts["caught"] < len(lines))


if __name__ == "__main__":
    sys.exit(main())
