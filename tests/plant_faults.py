"""Score the tests: plant small faults one by one and see which are caught.

    python tests/plant_faults.py [--only NAME …] [--tree CHECKOUT] [--csv FILE]

Each fault is one edit of the package's text, found wherever it stands, so that files may move. A copy of the checkout
gets the edit and runs the tests of the fault's area, as `make test` would; a fault that no test notices is `missed`.
Where code was rewritten, a fault keeps the texts of both forms. A fault whose text is not there is `gone`: write its
form for the new code. Exit status: 0 if every fault was caught.
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
        "multirank/test_miss_counts.py", "multirank/test_communicator.py",
        "multirank/test_lost_peer.py", "multirank/test_bad_input.py", "unit/test_misses.py", "unit/test_db_misses.py",
    ],
    "db": ["unit/test_db_*.py", "unit/test_manifest*.py", "unit/test_transfer*.py"],
    "tuner": ["unit/test_tuner_*.py", "multirank/test_tuner_faults.py", "multirank/test_verify.py"],
    "ops": [
        "multirank/test_bad_input.py", "multirank/test_fast_calls.py", "multirank/test_dispatch.py",
        "multirank/test_gemm_calls.py", "multirank/test_all_reduce_bias.py", "multirank/test_all_to_all_v.py",
        "multirank/test_operators.py", "multirank/test_autograd.py",
    ],
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """One edit: in one of the forms `(text, replacement)`, the first that the package holds exactly once."""

    area: str
    name: str
    forms: tuple[tuple[str, str], ...]


def fault(area: str, name: str, *forms: tuple[str, str]) -> Fault:
    return Fault(area, name, forms)


FAULTS = [
    fault("selection", "noise_ignores_samples", ("spread / math.sqrt(row.samples)", "spread / row.samples")),
    fault(
        "selection",
        "score_inverted",
        (
            "/ math.pow(own_us, exponent) * math.pow(baseline_us, exponent)",
            "* math.pow(own_us, exponent) / math.pow(baseline_us, exponent)",
        ),
        (
            "/ math.pow(own_us, share) * math.pow(baseline_us, share)",
            "* math.pow(own_us, share) / math.pow(baseline_us, share)",
        ),
    ),
    fault("selection", "disturbed_rows_count", ("own_us > _DISTURBED * baseline_us", "own_us < 0 * baseline_us")),
    fault(
        "selection",
        "layer_before_drift",
        ("(row.borrowed, row.drift, row.layer_rank)", "(row.borrowed, row.layer_rank, row.drift)"),
    ),
    fault("selection", "plain_answered_by_symmetric", ('kinds.append("plain")', 'kinds.append("symmetric")')),
    fault(
        "selection",
        "stale_rows_count",
        ("return None if current == source_hash else changed", "return None if current else changed"),
        ("if current is None or current == source_hash:", "if current is None or current:"),
        ("if current is None or current == held:", "if current is None or current:"),
    ),
    fault(
        "selection",
        "max_sms_ignored",
        ("reason = reason or self._why_too_large(candidate)", "reason = reason or None"),
        ("self.feasible(candidate) or self._too_large(candidate)", "self.feasible(candidate)"),
        ("if self.max_sms is None or 0 <= (sms", "if True or 0 <= (sms"),
    ),
    fault(
        "selection",
        "interpolation_swapped",
        (
            "return math.exp((1 - weight) * math.log(low) + weight * math.log(high))",
            "return math.exp(weight * math.log(low) + (1 - weight) * math.log(high))",
        ),
        (
            "(1 - weight) * math.log(self.low) + weight * math.log(self.high)",
            "weight * math.log(self.low) + (1 - weight) * math.log(self.high)",
        ),
    ),
    fault(
        "selection",
        "bound_from_below_lost",
        ("[t_low * 2**doublings]", "[t_low]"),
        ("self.low * 2**place.doublings", "self.low"),
    ),
    fault(
        "selection",
        "numerics_policy_ignored",
        ("elif not admits(self.policy, numerics):", "elif numerics is None:"),
        ("if not admits(self.policy, numerics):", "if numerics is None:"),
    ),
    fault("dispatch", "mode_off_ignored", ('.settings.mode == "off"', '.settings.mode == "offline"')),
    fault(
        "dispatch",
        "mode_force_ignored",
        (
            'if communicator.settings.mode == "force" and decision.source == "library":',
            'if communicator.settings.mode == "forced" and decision.source == "library":',
        ),
        (
            'if communicator.settings.mode == "force" and not decision.is_answered:',
            'if communicator.settings.mode == "forced" and not decision.is_answered:',
        ),
    ),
    fault(
        "dispatch",
        "nan_unseen",
        ("if found:\n                raise NanInputError", "if found < 0:\n                raise NanInputError"),
        ("if found:\n            raise NanInputError", "if found < 0:\n            raise NanInputError"),
    ),
    fault(
        "dispatch",
        "misses_by_every_rank",
        ("in MISSES and communicator.rank == 0 and", "in MISSES and"),
        ("if communicator.rank != 0 or settings", "if settings"),
        ("if communicator.rank != 0 or (noted", "if (noted"),
    ),
    fault("dispatch", "misses_counted_twice", ("counter.count += 1", "counter.count += 2")),
    fault(
        "dispatch",
        "others_failure_unheard",
        (
            "for rank, (_, text) in enumerate(theirs):\n        if text:",
            "for rank, (_, text) in enumerate(theirs):\n        if not text and text:",
        ),
    ),
    fault(
        "dispatch",
        "settings_not_compared",
        ("if other.get(name) != theirs[0].get(name):", "if other.get(name) != other.get(name):"),
        ("not in other or first[name] != other[name]:", "not in other:"),
    ),
    fault(
        "dispatch",
        "forced_variant_unchecked",
        (
            "if reason := check_candidate(problem, candidate, limits):\n        raise InfeasibleError",
            "if reason := None:\n        raise InfeasibleError",
        ),
    ),
    fault(
        "dispatch",
        "policy_unchecked",
        ("if policy is not None and policy not in settings.POLICIES:", "if policy in ():"),
    ),
    fault(
        "dispatch",
        "plans_survive_force",
        (
            "dispatcher.forced_ops[op] = (variant, clean)\n    _forget_plans()",
            "dispatcher.forced_ops[op] = (variant, clean)",
        ),
        ("_forced[op] = (variant, clean)\n    _forget_plans()", "_forced[op] = (variant, clean)"),
        ("    forced_ops[op] = (variant, clean)\n    _forget_plans()", "    forced_ops[op] = (variant, clean)"),
    ),
    fault(
        "db",
        "newest_row_lost",
        (
            "if row.tier != known.tier:\n        return row.tier < known.tier\n    return _age(row) > _age(known)",
            "if row.tier != known.tier:\n        return row.tier < known.tier\n    return _age(row) < _age(known)",
        ),
        ("for part in row.tier), row.created_at, *content)", "for part in row.tier), *content)"),
    ),
    fault(
        "db",
        "pins_of_other_world_sizes",
        ("if pin.problem.world_size != self._world_size or pin", "if pin.problem.world_size < 0 or pin"),
        ("if p.problem.world_size == world_size and", "if world_size and"),
        ("if pin.problem.world_size == world_size and", "if world_size and"),
        ("for pin in pins if pin.problem.world_size == world_size]", "for pin in pins if world_size]"),
    ),
    fault(
        "db",
        "failures_forgotten",
        ('if f.created_at >= self.good.get(k, "")', 'if f.created_at > "z"'),
        ('if failure.created_at >= self.good.get(key, "")', 'if failure.created_at > "z"'),
        ('if failure[0] >= good.get(place, "") and', 'if failure[0] > "z" and'),
    ),
    fault(
        "db",
        "manifest_not_compared",
        (
            'if (said["num_bytes"], said["sha256"]) != (num_bytes, sha256.hexdigest()):',
            'if said["num_bytes"] != num_bytes:',
        ),
        ("if content != {name: said[name] for name in content}:", 'if content["num_bytes"] != said["num_bytes"]:'),
    ),
    fault(
        "db",
        "status_unchecked",
        ("if value not in STATUSES:", "if value in ():"),
        ('check_one_of(status, STATUSES, "status")\n    if status == "ok"', 'if status == "ok"'),
    ),
    fault(
        "db",
        "absurd_latency_taken",
        ("not LEAST_US <= cast(float, value) <= MOST_US", "not -1e30 <= cast(float, value) <= 1e30"),
        ("not LEAST_US <= value <= MOST_US", "not -1e30 <= value <= 1e30"),
        ("is_number and LEAST_US <= value <= MOST_US", "is_number and -1e30 <= value <= 1e30"),
    ),
    fault(
        "db",
        "status_filter_ignored",
        ("where.append(TrialRow.status == status)", "pass"),
        ("_equal((TrialRow.status, status), (TrialRow.final, final))", "_equal((TrialRow.final, final))"),
    ),
    fault(
        "db",
        "pins_pile_up",
        ('            _remove_pins(connection, keys["problem_id"], environment)\n', "\n"),
        ('self._remove_pins(connection, keys["problem_id"], environment)\n', "\n"),
        ("            _remove_pins(connection, problem, environment)\n", "\n"),
    ),
    fault(
        "db",
        "config_not_flat",
        ("isinstance(v, (bool, int, str)) for v in config.values()", "v is not None for v in config.values()"),
        ("isinstance(axis, str) and isinstance(value, (bool, int, str)) for", "value is not None for"),
    ),
    fault(
        "db",
        "other_ops_variant_taken",
        ("if variant.op != problem.op:\n        raise ValueError", "if variant.op is None:\n        raise ValueError"),
    ),
    fault("tuner", "sentinel_is_zero", ('tensor.fill_(float("nan") if', "tensor.fill_(0.0 if")),
    fault("tuner", "odd_sizes_unchecked", ("(numel - 1, numel + 3) if n > 0", "() if n > 0")),
    fault(
        "tuner",
        "bits_not_compared",
        ("wanted = case.bits[index] if ordered and case.bits is not None else None", "wanted = None"),
        ("case.bits[index] if ordered and case.bits is not None else None)", "None)"),
        ("case.bits[index] if ordered and case.bits is not None else None", "None"),
    ),
    fault("tuner", "tolerance_ignored", ("if not error_value <= tolerance:", "if error_value < 0:")),
    fault(
        "tuner",
        "inputs_may_change",
        (
            "return all(torch.equal(*(x.view(_BITS[x.element_size()]) for x in pair)) for pair in pairs)",
            "return bool(list(pairs)) or True",
        ),
        ("return all(torch.equal(_bits(now), _bits(then)) for", "return all(now is not then for"),
        ("return all(map(_same_bits, inputs, case.inputs))", "return bool(inputs) or True"),
        (
            "return all(torch.equal(_bits(now), _bits(then)) for now, then in zip(inputs, case.inputs, strict=True))",
            "return bool(inputs) or True",
        ),
    ),
    fault(
        "tuner",
        "order_never_changes",
        ("return [(number + sign * step) % count for step in steps]", "return [step % count for step in steps]"),
    ),
    fault(
        "tuner",
        "arena_left_dirty",
        ("Trouble.INCORRECT if count else Trouble.NONE", "Trouble.NONE if count else Trouble.NONE"),
        ("(count := workspace.rearm(problem.mode)):", "(count := workspace.rearm(problem.mode)) < 0:"),
        ("Trouble.INCORRECT if faults else Trouble.NONE", "Trouble.NONE if faults else Trouble.NONE"),
    ),
    fault(
        "tuner",
        "hang_is_a_crash",
        ("return None, Trouble.HUNG, str(error)", "return None, Trouble.CRASHED, str(error)"),
    ),
    fault(
        "ops",
        "overlap_unseen",
        ("if not same and out_low < high and low < out_high:", "if not same and out_low < low and high < low:"),
    ),
    fault(
        "ops",
        "avg_of_integers",
        ('if op == "avg" and not x.is_floating_point():', 'if op == "average" and not x.is_floating_point():'),
    ),
    fault(
        "ops",
        "expanded_out_taken",
        (
            "if any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride(), strict=True)):",
            "if False:",
        ),
        ("any(stride == 0 and size > 1 for size, stride in zip(out.shape", "any(False for _ in zip(out.shape"),
    ),
    fault("ops", "negative_dim_shifted", ("return dim % count", "return abs(dim) % count")),
    fault(
        "ops",
        "gradients_lost",
        ("if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):", "if False:"),
        ("(recording and tensor.requires_grad) or type(tensor)", "type(tensor)"),
    ),
    fault(
        "ops",
        "strides_ignored",
        ("return tensor.is_contiguous() and not tensor.is_neg()", "return not tensor.is_neg()"),
        (
            "plain = tensor.is_contiguous() and not tensor.data_ptr() & MISALIGNED",
            "plain = not tensor.data_ptr() & MISALIGNED",
        ),
    ),
]


def planted(tree: Path, found: Fault) -> Path | None:
    """The file that holds the fault now, or None where its text is nowhere."""
    sources = {path: path.read_text(encoding="utf-8") for path in sorted((tree / "tunedcomm").rglob("*.py"))}
    for text, replacement in found.forms:
        places = [path for path, source in sources.items() if text in source]
        if len(places) == 1 and sources[places[0]].count(text) == 1:
            places[0].write_text(sources[places[0]].replace(text, replacement), encoding="utf-8")
            return places[0]
    return None


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
