"""Whether the rows of a database make sense: values, digests, references, configs in their variants' spaces.

Readers skip a row that makes no sense and go on; here each is found and counted. Nothing is changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, String, select, type_coerce

from tunedcomm.db import query
from tunedcomm.db import rows as parse
from tunedcomm.db.findings import Finding, Level
from tunedcomm.db.records import config_digest, utc_now
from tunedcomm.db.rows import Reader, StoredVariant
from tunedcomm.db.schema import Base, EnvironmentRow, PinRow, ProblemRow, RunRow, TrialRow, VariantRow
from tunedcomm.db.sources import SourceHash, is_current
from tunedcomm.errors import ConfigError
from tunedcomm.space import Value
from tunedcomm.spec import Problem, variants

__all__ = ["RowReport", "check_rows"]

_BATCH = 10_000
_MAX_EXAMPLES = 3
# Clocks of hosts differ a little; a trial from further ahead would outrank what is measured until then.
_AHEAD = timedelta(days=1)
_PRUNE_INVALID = "`tunedcomm db prune --invalid` removes them"
_MEND_PIN = "`tunedcomm db unpin` it, or `tunedcomm db pin` something that can run"


@dataclass(slots=True)
class _Wrong:
    """Rows with one fault: how many, and the first few in words."""

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        self.count += 1
        if len(self.examples) < _MAX_EXAMPLES:
            self.examples.append(text[:300])

    def finding(self, name: str, what: str, mend: str, *, level: Level = "fail") -> list[Finding]:
        """The finding that says so; none where nothing is wrong."""
        if not self.count:
            return []
        more = self.count - len(self.examples)
        told = "; ".join([*self.examples, *([f"and {more} more"] if more else [])])
        return [Finding(name, level, f"{self.count} {what}: {told}", mend)]


@dataclass(frozen=True, slots=True)
class RowReport:
    """What was found.

    Attributes:
        findings: one a kind of fault, or one that says that all is well.
        invalid: table to the ids of rows that no reader uses; a trial that refers to such a row is one itself.
    """

    findings: tuple[Finding, ...]
    invalid: Mapping[str, frozenset[int]]


def check_rows(connection: Connection, source_hash: SourceHash) -> RowReport:
    """Look at every row.

    Args:
        connection: in a transaction that reads a database of this tunedcomm's schema.
        source_hash: what the variants' sources are now; the variants must be registered.
    """
    return _Check(connection, source_hash).run()


class _Check:
    def __init__(self, connection: Connection, source_hash: SourceHash) -> None:
        self._connection = connection
        self._source_hash = source_hash
        self._reader = Reader()
        self._latest = utc_now() + _AHEAD
        self._invalid: dict[str, set[int]] = {name: set() for name in Base.metadata.tables}
        self._findings: list[Finding] = []
        self._problems: dict[int, Problem] = {}
        self._variants: dict[int, StoredVariant] = {}
        self._environments: dict[int, Any] = {}
        self._runs: set[int | None] = set()
        self._objections: dict[tuple[int, object], str | None] = {}
        self._used: dict[str, set[int]] = {name: set() for name in Base.metadata.tables}
        self._by_variant: Counter[int] = Counter()

    def run(self) -> RowReport:
        self._environments = self._load(EnvironmentRow, parse.parse_environment)
        self._problems = self._load(ProblemRow, parse.parse_problem)
        self._variants = self._load(VariantRow, parse.parse_variant)
        self._runs = {None, *self._load(RunRow, _parse_run), *self._invalid["run"]}
        self._check_trials()
        self._check_pins()
        self._check_sources()
        self._check_unused()
        return RowReport(tuple(self._findings), {name: frozenset(ids) for name, ids in self._invalid.items()})

    def _rows(self, model: type[Base]) -> Iterator[Any]:
        # As they lie: a result processor would raise in the middle of a fetch.
        columns = [type_coerce(column, String()).label(column.key) for column in query.table(model).columns]
        rows = self._connection.execute(select(*columns), execution_options={"yield_per": _BATCH})
        yield from rows.mappings()

    def _report(self, name: str, found: list[Finding], well: str) -> None:
        self._findings += found or [Finding(name, "ok", well)]

    def _load(self, model: type[Base], parser: Any) -> dict[int, Any]:
        """Rows that parse, and have the digest of what they hold where they have one."""
        found: dict[int, Any] = {}
        wrong, name = _Wrong(), model.__tablename__
        for row in self._rows(model):
            try:
                value = parser(row)
                if "digest" in row and row["digest"] != value.digest:
                    raise ValueError(f"its digest is {row['digest']!r:.80}, that of its fields is {value.digest!r}")
                found[row["id"]] = value
            except ValueError as error:
                self._invalid[name].add(row["id"])
                wrong.add(f"{name} {row['id']}: {error}")
        mend = f"{_PRUNE_INVALID} with the trials that refer to them; or restore a copy"
        self._report(f"{name}s", wrong.finding(f"{name}s", "rows make no sense", mend), f"{len(found)}, all sound")
        return found

    # Trials

    def _check_trials(self) -> None:
        wrong, outside, count = _Wrong(), _Wrong(), 0
        for row in self._rows(TrialRow):
            count += 1
            self._note_used(row)
            try:
                self._check_trial(row)
                self._by_variant[row["variant_id"]] += 1
                if reason := self._outside(row["variant_id"], row["config"]):
                    outside.add(f"trial {row['id']}: {reason}")
                    self._invalid["trial"].add(row["id"])
            except ValueError as error:
                self._invalid["trial"].add(row["id"])
                wrong.add(f"trial {row['id']}: {error}")
        found = wrong.finding("trials", "make no sense, readers skip them", f"{_PRUNE_INVALID}; or restore a copy")
        found += outside.finding("trials", "have configs outside of their variants' spaces", _PRUNE_INVALID)
        self._report("trials", found, f"{count}, all sound")

    def _note_used(self, row: Mapping[str, Any]) -> None:
        for name in ("environment", "problem", "variant", "run"):
            self._used[name].add(row.get(f"{name}_id"))  # type: ignore[arg-type]

    def _check_trial(self, row: Mapping[str, Any]) -> None:
        """Raises ValueError with what is wrong."""
        problem, variant = self._problems.get(row["problem_id"]), self._variants.get(row["variant_id"])
        if problem is None or variant is None or row["environment_id"] not in self._environments:
            raise ValueError("it refers to a problem, environment or variant that is not there or makes no sense")
        if row["run_id"] not in self._runs:
            raise ValueError(f"it refers to run {row['run_id']}, which is not there")
        if variant.op != problem.op:
            raise ValueError(f"a variant of {variant.op!r:.80} on a problem of {problem.op!r:.80}")
        status = parse.status_of(row["status"])
        names = ("latency_p10_us", "latency_p50_us", "latency_p90_us", "baseline_p50_us")
        low, middle, high, _ = (parse.latency_of(row[name], name) for name in names)
        if status == "ok" and middle is None:
            raise ValueError("it is ok and has no latency_p50_us")
        if not (low or 0.0) <= (middle or low or 0.0) <= (high or middle or low or 0.0):
            raise ValueError(f"its percentiles do not rise: p10 {low}, p50 {middle}, p90 {high}")
        config = self._reader.config(row["config"])
        if row["config_digest"] != config_digest(config):
            raise ValueError(f"its config_digest is {row['config_digest']!r:.40}, not that of {row['config']:.80}")
        parse.text_of(row["reason"], "reason")
        parse.int_of(row["samples"], "samples")
        parse.error_of(row["error"])
        parse.bool_of(row["final"], "final")
        created_at = parse.time_of(row["created_at"])
        if created_at > self._latest:
            raise ValueError(f"it was made in the future, {created_at.isoformat()}, and would outrank what comes")

    def _outside(self, variant_id: int, text: object) -> str | None:
        """Why a config is not one of its variant's; None where it is, or where the source was another one."""
        key = (variant_id, text)
        if key not in self._objections:
            stored = self._variants[variant_id]
            current = is_current(stored, self._source_hash)
            config = self._reader.config(text)
            self._objections[key] = _objection(stored.op, stored.name, config) if current else None
        return self._objections[key]

    # The rest

    def _check_pins(self) -> None:
        wrong, unknown, count = _Wrong(), _Wrong(), 0
        for row in self._rows(PinRow):
            count += 1
            self._note_used(row)
            try:
                problem = self._problems.get(row["problem_id"])
                if problem is None or row["environment_id"] not in self._environments:
                    raise ValueError("it refers to a problem or environment that is not there or makes no sense")
                name, config = parse.text_of(row["variant"], "variant"), self._reader.config(row["config"])
                for column in ("reason", "user"):
                    parse.text_of(row[column], column)
                parse.time_of(row["created_at"])
                if name not in variants(problem.op):
                    unknown.add(f"pin {row['id']}: {problem.op} has no variant {name!r} here")
                elif reason := _objection(problem.op, name, config):
                    raise ValueError(reason)
            except ValueError as error:
                self._invalid["pin"].add(row["id"])
                wrong.add(f"pin {row['id']}: {error}")
        found = wrong.finding("pins", "are of no effect", _MEND_PIN)
        found += unknown.finding("pins", "name variants that this tunedcomm does not have", _MEND_PIN, level="warn")
        self._report("pins", found, f"{count}, all sound")

    def _check_sources(self) -> None:
        stale, unknown, current = Counter[str](), Counter[str](), 0
        for variant_id, count in self._by_variant.items():
            stored = self._variants[variant_id]
            state = is_current(stored, self._source_hash)
            current += count if state else 0
            if state is None:
                unknown[f"{stored.op} {stored.name}"] += count
            elif not state:
                stale[f"{stored.op} {stored.name}"] += count
        found = []
        if stale:
            text = f"kernels have changed since these trials, which are not used any more: {_listed(stale)}"
            mend = "`tunedcomm tune` measures them again; `tunedcomm db prune --stale` removes the old trials"
            found.append(Finding("sources", "warn", text, mend))
        if unknown:
            text = f"variants that this tunedcomm does not have: {_listed(unknown)}"
            found.append(Finding("sources", "warn", text, "nothing, where another tunedcomm reads the database too"))
        self._report("sources", found, f"{current} trials, all of kernels as they are now")

    def _check_unused(self) -> None:
        sizes = {"environment": len(self._environments), "problem": len(self._problems)}
        unused = {name: size - len(self._used[name] - {None} - self._invalid[name]) for name, size in sizes.items()}
        told = ", ".join(f"{count} {name}s" for name, count in unused.items() if count > 0)
        mend = "nothing: they do no harm, and `tunedcomm db prune` removes them on its way"
        found = [Finding("unused rows", "warn", f"{told} that no trial and no pin refers to", mend)] if told else []
        self._report("unused rows", found, "none")


def _objection(op: str, name: str, config: Mapping[str, Value]) -> str | None:
    try:
        variants(op)[name].space.validate(dict(config))
    except ConfigError as error:
        return f"{name}: {error}"
    return None


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} of {name}" for name, count in sorted(counts.items()))


def _parse_run(row: Mapping[str, Any]) -> datetime:
    for name in ("command", "budget", "host", "user", "version"):
        parse.text_of(row[name], name)
    if row["finished_at"] is not None:
        parse.time_of(row["finished_at"])
    return parse.time_of(row["started_at"])
