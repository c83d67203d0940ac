"""The choice of the candidate that runs a problem: a pure function of a snapshot, a catalog and the problem.

Order of resolution: forced, pin, exact, interpolated, borrowed, heuristic, library. Exact borrowed rows go before rows
of this hardware that merely reach the size, without a prediction, and before a rule of thumb.

- Never considered, except when forced: a candidate that the numerics policy excludes, that cannot run, or whose source
  has changed since it was measured. A pin is bound by policy and feasibility but not by the source.
- *Exact*: the rows of that very problem, the most conclusive tier of them (`Row.tier`), compared by their scores.
- *Interpolated*: rows of the same family at other sizes (`message_bytes`; of shapes with several extents all but the
  first must agree), as `interpolate` describes. If no such size answers for a GEMM or an op of experts, the winner of
  the nearest shape in log-log serves, each extent within a factor of `MAX_REACH` or of the op's `shape_reach`; no
  latency is predicted there.
  Candidates that were incorrect, crashed or hung in the family, and have not been good there since, are not
  interpolated, nor taken over from a related family. Where a family gives no answer, its `related_problems` are asked.
- *Borrowed*: the same two rules over rows of siblings and of other hardware that the user allows, where rows of this
  hardware give no answer. Their times rank candidates and predict nothing. A borrowed candidate must beat the library's
  best form, which may be in place, by `_BORROWED_MARGIN`, and gives way to the library where it failed its check on
  this machine or was slower in it.
- *Heuristic*: eager calls that nothing above answers run as in graphs, never the other way round: by rows of this
  hardware, then by borrowed ones. A variant whose
  `Variant.default_beats_library` says so runs its default config where nothing near the size is measured, and where
  the rows that answer compare the library with other variants alone.
- *Checked first*: an op with a `shape_reach` runs kernels by the nearest shape and by rule of thumb, once they agreed
  with the library in a check at the problem's first call and were not slower there.
- *Library*: nothing above answers.
- `max_sms` leaves out candidates that take more SMs. The library ignores it, so a challenger need not be faster; where
  none fits, the library serves.
- A challenger must beat the library by more than its noise (skipped where the policy excludes the library).
- Near ties, within noise of the fastest, go to the one that is within noise of the best at more of the nearest two
  sizes below and above, then to the one that loses fewer whole per cent there, then by name. So tuning again does not
  flip the choice, and neighbouring sizes tend to share a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from itertools import islice
from typing import Any, Literal, Protocol, TypeAlias, cast

from tunedcomm.errors import InfeasibleError
from tunedcomm.fp8 import WIRE_ERRORS
from tunedcomm.hardware import Environment
from tunedcomm.metrics import format_bytes, format_us
from tunedcomm.selection.families import Family, Rows, Shape, Tables
from tunedcomm.selection.interpolate import GEMM_EXTENTS, MAX_GAP, MAX_REACH
from tunedcomm.selection.score import MAX_NOISE, Pool, Scored, median_baseline
from tunedcomm.selection.snapshot import Check, Row, Snapshot
from tunedcomm.spec import (
    Candidate,
    Limits,
    Numerics,
    NumericsPolicy,
    Problem,
    admits,
    checker,
    find_op,
    find_variant,
    format_shape,
    get_op,
    get_variant,
    ops,
    variants,
    why_no_kernel,
)

Source: TypeAlias = Literal["forced", "pin", "exact", "interpolated", "borrowed", "heuristic", "library"]
# By so much the library must be slower than a borrowed candidate, where that was measured.
_BORROWED_MARGIN = 1.05


class Catalog(Protocol):
    """Facts about variants that selection needs, for one machine and group."""

    def under(self, policy: NumericsPolicy) -> Catalog:
        """The catalog for calls under `policy`, which may rule configs out."""
        return self

    def checker(self, candidate: Candidate, *, by_name: bool) -> Callable[[Problem], str | None]:
        """Return a function that says why `candidate` cannot run a problem, or None.

        Without `by_name` the function also refuses what may only be forced. Unknown variants and configs outside of
        their space have a reason, too. Never asked about the library.
        """

    def source_hash(self, op: str, variant: str) -> str | None:
        """Current source hash; None for an unknown variant."""

    def state_of(self, op: str, variant: str) -> object:
        """As long as it is equal, so is all that the catalog says about the variant."""
        return self.source_hash(op, variant)

    def numerics(self, op: str, variant: str) -> Numerics | None:
        """Numerics class; None for an unknown variant."""

    def same_in_both_modes(self, op: str, variant: str) -> bool:
        """True if the variant can run a problem in graphs wherever it can in eager calls, and the other way round."""
        return False

    def message_bytes(self, problem: Problem) -> int:
        """The size by which problems of one family are compared."""
        return problem.nbytes

    def num_blocks(self, problem: Problem, candidate: Candidate) -> int:
        """SMs that the candidate takes at most; -1 where that is not known."""
        return -1

    def num_rounds(self, problem: Problem, candidate: Candidate) -> int:
        """Rounds of the candidate's grid; 0 where that is not known."""
        return 0

    def shape_reach(self, candidate: Candidate) -> tuple[int, ...]:
        """`OpSpec.shape_reach` of a candidate with kernels, else empty."""
        return ()

    def why_no_kernel(self, problem: Problem, policy: NumericsPolicy) -> str | None:
        """Return why no variant that the policy admits can run `problem`, or None. Tuning cannot help then."""
        return None

    def default_beating_library(self, problem: Problem, max_sms: int | None = None) -> Candidate | None:
        """The candidate that is known to beat the library here unmeasured, on so many SMs, or None."""
        return None

    def defaults(self, problem: Problem, max_sms: int | None) -> Iterable[Candidate]:
        """Each variant's default, or with fewer blocks where it takes more SMs; variants without kernels come last."""
        return ()


@dataclass(frozen=True, slots=True)
class Registered(Catalog):
    """The registered variants, within `limits`; `hash_of(op, variant)` is the current source hash, if there is one."""

    limits: Limits
    hash_of: Callable[[str, str], str | None]

    def under(self, policy: NumericsPolicy) -> Registered:
        ordered = not admits(policy, "library")
        return self if self.limits.ordered == ordered else replace(self, limits=replace(self.limits, ordered=ordered))

    def checker(self, candidate: Candidate, *, by_name: bool) -> Callable[[Problem], str | None]:
        return checker(candidate, self.limits, by_name=by_name)

    def source_hash(self, op: str, variant: str) -> str | None:
        return self.hash_of(op, variant)

    def state_of(self, op: str, variant: str) -> object:
        return self.hash_of, find_variant(op, variant)

    def numerics(self, op: str, variant: str) -> Numerics | None:
        found = find_variant(op, variant)
        return None if found is None else found.numerics

    def same_in_both_modes(self, op: str, variant: str) -> bool:
        found = find_variant(op, variant)
        return found is not None and found.same_in_both_modes

    def message_bytes(self, problem: Problem) -> int:
        return get_op(problem.op).message_bytes(problem)

    def num_blocks(self, problem: Problem, candidate: Candidate) -> int:
        return get_variant(candidate.op, candidate.variant).num_blocks(problem, candidate.config_dict)

    def num_rounds(self, problem: Problem, candidate: Candidate) -> int:
        return get_variant(candidate.op, candidate.variant).num_rounds(problem, candidate.config_dict)

    def shape_reach(self, candidate: Candidate) -> tuple[int, ...]:
        variant, spec = find_variant(candidate.op, candidate.variant), find_op(candidate.op)
        return spec.shape_reach if spec is not None and variant is not None and variant.kernels else ()

    def why_no_kernel(self, problem: Problem, policy: NumericsPolicy) -> str | None:
        return why_no_kernel(problem, self.limits, policy)

    def default_beating_library(self, problem: Problem, max_sms: int | None = None) -> Candidate | None:
        limits = self.limits
        if max_sms is not None and limits.backend == "cuda":
            limits = replace(limits, num_sms=min(limits.num_sms, max(max_sms, 1)))
        for variant in variants(problem.op).values():
            if variant.default_beats_library(problem, limits):
                return Candidate.of(problem.op, variant.name, variant.default_config(problem, limits))
        return None

    def defaults(self, problem: Problem, max_sms: int | None) -> Iterable[Candidate]:
        for variant in sorted(variants(problem.op).values(), key=lambda variant: (not variant.kernels, variant.name)):
            if variant.is_library:
                continue
            config = variant.default_config(problem, self.limits)
            yield Candidate.of(problem.op, variant.name, config)
            blocks = dict(variant.space.axes)["num_blocks"].values() if "num_blocks" in config and max_sms else ()
            for count in sorted((int(each) for each in blocks if int(each) <= int(max_sms or 0)), reverse=True):
                yield Candidate.of(problem.op, variant.name, {**config, "num_blocks": count})


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The candidate to run, and why. An explanation is printed as `tunedcomm explain` prints it.

    Attributes:
        source: the rule that chose it. `exact`, `interpolated` and `borrowed` may well choose the library.
        latency_us, library_us: expected latencies of the candidate and of the library, None where not known.
        runner_up: the fastest other challenger, None if there was none.
        trial_id, layer, environment: the trial that decided, and where it was measured.
        is_unproven: nothing near says that it is right and faster than the library here; the first call checks it.
        passed_over: every other candidate that was looked at, with the reason.
        ordered, ordered_us: in an explanation, what numerics="ordered" would run and its expected latency, if it is
            another candidate and both latencies are known; else None.
        problem, asked_for: of an explanation, the problem and the machine that asks.
        left_out: of an explanation, variants of which no candidate was looked at, each with the reason.
        nearest: of an explanation where nothing is stored for this hardware, the stored environment most like it.
        memory: of an explanation within a program, what the group holds of the device's memory, and for what.
    """

    candidate: Candidate
    source: Source
    why: str
    latency_us: float | None = None
    library_us: float | None = None
    runner_up: Candidate | None = None
    runner_up_us: float | None = None
    trial_id: int | None = None
    layer: str | None = None
    environment: Environment | None = None
    is_unproven: bool = False
    passed_over: tuple[tuple[str, str], ...] = ()
    ordered: Candidate | None = None
    ordered_us: float | None = None
    problem: Problem | None = field(default=None, compare=False)
    asked_for: Environment | None = field(default=None, compare=False)
    left_out: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    nearest: Environment | None = field(default=None, compare=False)
    memory: str | None = field(default=None, compare=False)

    @property
    def needs_check(self) -> bool:
        """True if nothing measured on this hardware speaks for the candidate."""
        return self.source == "borrowed" or self.is_unproven

    @property
    def is_answered(self) -> bool:
        """True if a database, a pin or a name decided."""
        return self.source != "library" and not (self.source == "heuristic" and self.environment is None)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        plain = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "candidate"}
        nearest = None if self.nearest is None else {"digest": self.nearest.digest, **self.nearest.to_dict()}
        if nearest is not None and self.nearest is not None and self.asked_for is not None:
            nearest["differences"] = list(self.asked_for.differences(self.nearest).values())
        there = self.asked_for
        return {
            "problem": None if self.problem is None else self.problem.to_dict(),
            "asked_for": None if there is None else {"digest": there.digest, **there.to_dict()},
            "variant": self.candidate.variant,
            "config": self.candidate.config_dict,
            **{name: value for name, value in plain.items() if name not in ("problem", "asked_for")},
            "runner_up": None if self.runner_up is None else str(self.runner_up),
            "ordered": None if self.ordered is None else str(self.ordered),
            "environment": None if self.environment is None else asdict(self.environment),
            "passed_over": [{"candidate": name, "reason": reason} for name, reason in self.passed_over],
            "left_out": [{"variant": name, "reason": reason} for name, reason in self.left_out],
            "nearest": nearest,
        }

    def explanation(self) -> tuple[str, list[tuple[str, str]]]:
        """The problem and where it runs; the decision, the cost of the same bits, and what is unusual as evidence."""
        why = self.why.replace(str(self.candidate), "it")
        if self.problem is not None and self.library_us is not None and self.candidate.variant != "library":
            why += "; the library's time includes its copy" * get_op(self.problem.op).library_copies(self.problem)
        variant = find_variant(self.candidate.op, self.candidate.variant)
        functions = [kernel.fn for kernel in getattr(variant, "kernels", ())]
        modules = dict.fromkeys(function.__module__ for function in functions)
        entries = [("runs", str(self.candidate)), (self.source, why)]
        if functions:
            entries.append(("kernels", f"{', '.join(each.__name__ for each in functions)} in {', '.join(modules)}"))
        if self.ordered_us is not None and self.latency_us is not None:
            cost = self.ordered_us / self.latency_us - 1
            entries.append(("ordered", f"{self.ordered}, {format_us(self.ordered_us)} µs, {cost:+.0%}"))
        if self.problem is not None and (errors := WIRE_ERRORS.get(self.problem.scaling)):
            once, twice = (f"{error:.1%}" for error in errors)
            text = f"‖e‖/‖ref‖ of normal values is {once}, and {twice} from two_shot_quantized"
            entries.append(("wire", "nothing is quantised" if self.candidate.variant == "library" else text))
        if self.memory is not None:
            entries.append(("memory", self.memory))
        if self.problem is None or self.asked_for is None:
            return self.candidate.op, entries
        if self.environment is not None:
            if drift := self.asked_for.drift(self.environment):
                entries.append(("measured", f"before this changed: {', '.join(drift)}"))
            entries += [("not the same", text) for text in self.asked_for.differences(self.environment).values()]
        if self.nearest is not None:
            entries.append(("nearest", f"nothing is stored for this hardware; the nearest is {self.nearest}"))
            entries += [("", text) for text in self.asked_for.mismatches(self.nearest)]
        size = format_bytes(get_op(self.problem.op).message_bytes(self.problem))
        return f"{self.problem} ({size}) on {self.asked_for}", entries

    def __str__(self) -> str:
        head, entries = self.explanation()
        return "\n".join([head, *(f"  {name:<12}  {text}" for name, text in entries)])


def _resting_on(row: Row) -> dict[str, Any]:
    """The fields of a decision that name the measurement that it rests on."""
    return {"trial_id": row.trial_id, "layer": row.layer, "environment": row.environment}


# Changes to a decision where only the ranking is known.
_NO_TIMES: Mapping[str, Any] = {"latency_us": None, "library_us": None, "runner_up_us": None}


def choose(
    snapshot: Snapshot,
    problem: Problem,
    catalog: Catalog,
    *,
    policy: NumericsPolicy = "default",
    forced: Candidate | None = None,
    max_sms: int | None = None,
    with_reasons: bool = True,
) -> Decision:
    """Resolve `problem` by the rules in the module's docstring.

    Args:
        snapshot: the table that the group agreed on.
        problem: what is asked.
        catalog: what can run here.
        policy: numerics classes that the caller accepts.
        forced: a candidate asked for by name; it overrides everything but feasibility, also `policy` and `max_sms`.
        max_sms: SMs that the caller leaves to the call.
        with_reasons: also say why. Without it `why` and `passed_over` are incomplete, in a third of the time.

    Raises:
        InfeasibleError: the forced candidate cannot run, or the policy excludes the library and nothing that it admits
            is known.
    """
    catalog = catalog if forced is not None else catalog.under(policy)
    tables = _tables(snapshot, catalog, problem.op)
    judge = _judge(tables, catalog, policy, max_sms)
    lookup = _Lookup(tables, snapshot, judge, problem, problem, tables.in_any_mode(problem), with_reasons)
    if forced is not None:
        return _forced(lookup, forced)
    try:
        decision = _resolved(lookup)
    except InfeasibleError:
        if with_reasons:
            raise
        return choose(snapshot, problem, catalog, policy=policy, max_sms=max_sms)  # raises it with every reason
    if not with_reasons:
        return decision
    if decision.source != "borrowed":
        lent = lookup.tables.family(problem, borrowed=True).by_shape.get(problem.shape, ())
        for row in (row for row in lent if not row.is_library):
            lookup.pass_over(row.candidate, f"measured only on {row.environment.gpu}, which is borrowed")
    passed = {candidate: reason for candidate, reason in lookup.passed.items() if candidate != decision.candidate}
    return replace(decision, passed_over=tuple(sorted((str(c), reason) for c, reason in passed.items())))


def _resolved(lookup: _Lookup) -> Decision:
    """The decision of the first rule that has one."""
    decision = _pinned(lookup) or _by_rows(lookup)
    if decision is None and not lookup.library_admitted:
        # The library may not run at all, so a kernel slower than it does no harm: extrapolate to any size.
        decision = _interpolated(lookup, None) or _borrowed(lookup, None)
        decision = decision or _rule_of_thumb(lookup, lookup.rows_of_problem()) or _unmeasured_default(lookup)
    if decision is None:
        decision = _rule_of_thumb(lookup, lookup.rows_of_problem()) or _library(lookup)
    elif decision.candidate == lookup.library and decision.source == "borrowed":  # `_library_wins` asked for own rows
        decision = _rule_of_thumb(lookup, None) or decision
    return decision


def winners(
    snapshot: Snapshot, catalog: Registered, problems: Iterable[Problem], policy: NumericsPolicy = "default"
) -> dict[Problem, Decision]:
    """The choice at each problem if nothing is pinned; without unknown ops and what the policy leaves unanswered."""
    unpinned = replace(snapshot, pins=()) if snapshot.pins else snapshot
    known, found = ops(), dict[Problem, Decision]()
    for problem in problems:
        if problem.op in known:
            with suppress(InfeasibleError):
                found[problem] = choose(unpinned, problem, catalog, policy=policy)
    return found


def measured_pool(snapshot: Snapshot, problem: Problem, catalog: Catalog) -> Pool:
    """The candidates measured at `problem` itself that `choose` compares under the default policy."""
    tables = _tables(snapshot, catalog, problem.op)
    judge = _judge(tables, catalog, "default", None)
    lookup = _Lookup(tables, snapshot, judge, problem, problem, problem, with_reasons=False)
    return lookup.pool(lookup.rows_of_problem(), lookup.failed_at_rows())


def _tables(snapshot: Snapshot, catalog: Catalog, op: str) -> Tables:
    """The snapshot's rows of `op`, arranged for the kernels that the catalog has now."""
    names = snapshot.variants(op)
    state = [catalog.state_of(*name) for name in names]
    found: Tables | None = snapshot.arranged.get((type(catalog), op))
    if found is None or found.state != state:
        hashes = {name: catalog.source_hash(*name) for name in names}
        found = Tables(snapshot, op, hashes, lambda problem: max(1, catalog.message_bytes(problem)), state)
        snapshot.arranged[type(catalog), op] = found
    return found


_Check: TypeAlias = Callable[[Problem, Problem], str | None]
_MAX_JUDGES, _MAX_CHECKS = 8, 4096


class _Judge:
    """The checks of candidates under one catalog, policy and limit of SMs; no size changes what is looked up here."""

    def __init__(self, catalog: Catalog, policy: NumericsPolicy, max_sms: int | None) -> None:
        self.catalog, self.policy, self.max_sms = catalog, policy, max_sms
        self.library_admitted = admits(policy, "library")
        self._checks: dict[Hashable, _Check] = {}
        self._of_lists: dict[int, tuple[Sequence[Candidate], tuple[_Check, ...]]] = {}

    def check(self, candidate: Candidate) -> _Check:
        """A function that says why the candidate may not run a problem, or None.

        Its arguments are the problem, and the problem in any mode.
        """
        # With the types: a damaged row's True equals another's 1, and only one of them is in its axis.
        key = candidate, tuple(type(value) for _, value in candidate.config)
        found = self._checks.get(key)
        if found is None:
            if len(self._checks) >= _MAX_CHECKS:
                self._checks.clear()
            found = self._checks[key] = self._made(candidate)
        return found

    def checks(self, candidates: Sequence[Candidate]) -> tuple[_Check, ...]:
        """The checks of a list that the tables keep."""
        known = self._of_lists.get(id(candidates))
        if known is None or known[0] is not candidates:
            known = self._of_lists[id(candidates)] = candidates, tuple(map(self.check, candidates))
        return known[1]

    def _made(self, candidate: Candidate) -> _Check:
        catalog, max_sms, name = self.catalog, self.max_sms, (candidate.op, candidate.variant)
        numerics = catalog.numerics(*name)
        if numerics is None:
            unknown = f"variant {candidate.variant!r} is not known to this version of tunedcomm"
            return lambda problem, in_any_mode: unknown
        if not admits(self.policy, numerics):
            excluded = f"numerics class {numerics!r} is not admitted by policy {self.policy!r}"
            return lambda problem, in_any_mode: excluded
        ask, in_both_modes = catalog.checker(candidate, by_name=False), catalog.same_in_both_modes(*name)
        last: tuple[Problem | None, str | None] = (None, None)

        def check(problem: Problem, in_any_mode: Problem) -> str | None:
            nonlocal last
            asked = in_any_mode if in_both_modes else problem
            known, reason = last
            if known is not asked:
                reason = ask(asked)
                if reason is None and max_sms is not None:
                    reason = _too_many(catalog.num_blocks(asked, candidate), max_sms)
                last = asked, reason
            return reason

        return check


def _too_many(sms: int, max_sms: int) -> str | None:
    """Return why so many SMs are too many, or None."""
    if 0 <= sms <= max_sms:
        return None
    return f"{f'takes {sms} SMs' if sms >= 0 else 'takes an unknown number of SMs'}, with max_sms={max_sms}"


def _judge(tables: Tables, catalog: Catalog, policy: NumericsPolicy, max_sms: int | None) -> _Judge:
    """The judge that the tables keep for these arguments."""
    for judge in tables.judges:
        if judge.policy == policy and judge.max_sms == max_sms and judge.catalog == catalog:
            return cast("_Judge", judge)
    made = _Judge(catalog, policy, max_sms)
    tables.judges = [made, *tables.judges[: _MAX_JUDGES - 1]]
    return made


@dataclass(slots=True)
class _Lookup:
    """One resolution in progress: the arguments of `choose`, and what is known so far.

    `requested` is the caller's problem and `problem` the one whose rows are read; they differ only for an eager call
    that rows of graphs answer. `in_any_mode` is `requested` in some mode, the same object for both. `borrowed` selects
    the rows of other hardware. Without `with_reasons` neither candidates that were passed over nor reasons are kept.
    """

    tables: Tables
    snapshot: Snapshot
    judge: _Judge
    requested: Problem
    problem: Problem
    in_any_mode: Problem
    with_reasons: bool
    borrowed: bool = False
    passed: dict[Candidate, str] = field(default_factory=dict)
    family: Family = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.family = self.tables.family(self.problem, borrowed=self.borrowed)
        self.size = self.tables.size_of(self.problem)

    @property
    def catalog(self) -> Catalog:
        return self.judge.catalog

    @property
    def policy(self) -> NumericsPolicy:
        return self.judge.policy

    @property
    def max_sms(self) -> int | None:
        return self.judge.max_sms

    @property
    def library_admitted(self) -> bool:
        return self.judge.library_admitted

    @property
    def library(self) -> Candidate:
        return self.tables.library

    def rows_of_problem(self) -> Rows:
        return self.family.by_shape.get(self.problem.shape, _NO_ROWS)

    def pass_over(self, candidate: Candidate, reason: str) -> None:
        self.passed.setdefault(candidate, reason)

    def why_excluded(self, candidate: Candidate) -> str | None:
        """Return why the candidate may not run this problem here under this policy, or None."""
        return self.judge.check(candidate)(self.requested, self.in_any_mode)

    def why_stale(self, row: Row) -> str | None:
        """Return why the row no longer counts, or None."""
        if self.tables.is_fresh(row):
            return None
        if self.tables.hash_of(row.candidate) is None:
            return f"variant {row.candidate.variant!r} has no source here"
        return "its source has changed since it was measured; `tunedcomm tune` measures it again"

    def fresh(self, rows: Iterable[Row]) -> list[Row]:
        """Rows whose kernel is still the same; the library's always are."""
        return [row for row in rows if self.tables.is_fresh(row)]

    def failed_at_rows(self) -> Mapping[Candidate, str]:
        """Candidates that failed in the family of the caller's problem, where rows of another one answer for it."""
        return self.tables.failed(self.requested) if self.problem is not self.requested else {}

    def failed_near(self, family: Family) -> Mapping[Candidate, str]:
        """Candidates that failed where a prediction from rows of `family` looks."""
        return self.tables.failed(self.problem, family.problem, self.requested)

    def usable(self, rows: Iterable[Row], failed: Mapping[Candidate, str]) -> dict[Candidate, str | None]:
        """Each challenger with the reason why it may not run, or None; `failed` as `failed_near` has it."""
        return {row.candidate: self.why_unusable(row.candidate, failed) for row in rows if not row.is_library}

    def why_unusable(self, candidate: Candidate, failed: Mapping[Candidate, str]) -> str | None:
        """Return why the candidate may not run, also where it failed nearby, or None."""
        if reason := self.why_excluded(candidate):
            return reason
        check = self.check_of(candidate) if self.borrowed and not self.library_admitted else None
        if check is not None and check.status in ("failed", "skipped"):
            return check.why
        how = failed.get(candidate) if failed else None
        return None if how is None else f"{how}; it is not used where it was not measured"

    def is_plain(self, failed: Mapping[Candidate, str]) -> bool:
        """True if `why_unusable` says what `why_excluded` says."""
        return not failed and (self.library_admitted or not self.borrowed)

    def check_of(self, candidate: Candidate) -> Check | None:
        """The check of a candidate on this machine that counts at the caller's problem."""
        if not self.snapshot.checks:
            return None
        return self.snapshot.check_of(self.requested, candidate, self.hash_of(candidate))

    def hash_of(self, candidate: Candidate) -> str:
        """Source hash of the candidate's variant, also where nothing of it was measured; "" if it has none."""
        return self.tables.hash_of(candidate) or self.catalog.source_hash(candidate.op, candidate.variant) or ""

    def why_failed(self, candidate: Candidate) -> str | None:
        """Return why the candidate failed its check on this machine, or None."""
        check = self.check_of(candidate)
        return None if check is None or check.status != "failed" else check.why

    def why_lost(self, candidate: Candidate) -> str | None:
        """Return why the candidate gives way to the library after its check on this machine, or None."""
        check = self.check_of(candidate)
        if check is None or check.status == "passed" or (check.status == "slower" and self.max_sms is not None):
            return None
        return check.why

    def is_unchecked(self, candidate: Candidate) -> bool:
        """True if the candidate is to be checked here before its first call."""
        return self.snapshot.is_unchecked(self.requested, candidate, self.hash_of(candidate))

    def serves(self, rows: Rows, failed: Mapping[Candidate, str]) -> bool:
        """True if some challenger of fresh rows may be used."""
        if self.is_plain(failed):
            asked, in_any_mode = self.requested, self.in_any_mode
            return any(check(asked, in_any_mode) is None for check in self.judge.checks(rows.challengers))
        return any(self.why_unusable(candidate, failed) is None for candidate in rows.challengers)

    def verdicts(self, challengers: Sequence[Candidate], failed: Mapping[Candidate, str]) -> tuple[bool, ...]:
        """Of each challenger, True if it may be used."""
        if self.is_plain(failed):
            asked, in_any_mode = self.requested, self.in_any_mode
            return tuple([check(asked, in_any_mode) is None for check in self.judge.checks(challengers)])
        return tuple([self.why_unusable(candidate, failed) is None for candidate in challengers])

    def pool(self, rows: Rows, failed: Mapping[Candidate, str], *, every_trial: bool = False) -> Pool:
        """The pool of the rows that still count; records why the others do not."""
        self.report(rows, failed)
        return rows.fresh.pool(self.verdicts(rows.fresh.challengers, failed), every_trial=every_trial)

    def report(self, rows: Iterable[Row], failed: Mapping[Candidate, str]) -> None:
        """Record why rows that were looked at could not even compete."""
        if not self.with_reasons:
            return
        usable = self.usable(rows := list(rows), failed)
        rows = [row for row in rows if not row.is_library]
        fresh = {row.candidate for row in self.fresh(rows)}
        for row in rows:
            stale = None if row.candidate in fresh else self.why_stale(row)
            if reason := stale or usable.get(row.candidate):
                self.pass_over(row.candidate, reason)


_NO_ROWS = Rows()

# The rules, in the order of resolution.


def _forced(lookup: _Lookup, forced: Candidate) -> Decision:
    problem = lookup.problem
    reason = f"it is a candidate of {forced.op}" if forced.op != problem.op else None
    if forced != lookup.library:
        reason = reason or lookup.catalog.checker(forced, by_name=True)(problem)
    if reason is not None:
        raise InfeasibleError(f"forced candidate {forced} cannot run {problem}: {reason}; force another or none")
    numerics = lookup.catalog.numerics(forced.op, forced.variant)
    is_excluded = numerics is not None and not admits(lookup.policy, numerics)
    outside = f", though policy {lookup.policy!r} excludes it" if is_excluded else ""
    return _unmeasured(lookup, forced, "forced", f"{forced} was forced{outside}")


def _pinned(lookup: _Lookup) -> Decision | None:
    pin = lookup.tables.pins.get(lookup.problem)
    if pin is None:
        return None
    is_library = pin.candidate == lookup.library
    reason = None if is_library and lookup.library_admitted else lookup.why_excluded(pin.candidate)
    # A failure elsewhere in the family does not count where the candidate was good at this very problem.
    if not is_library and pin.candidate not in {row.candidate for row in lookup.fresh(lookup.rows_of_problem())}:
        reason = reason or lookup.tables.failed(lookup.problem).get(pin.candidate)
    if reason is None:
        text = f"{pin.candidate} is pinned in the {pin.layer} layer: {pin.reason or 'no reason given'}"
        return replace(_unmeasured(lookup, pin.candidate, "pin", text), layer=pin.layer)
    lookup.pass_over(pin.candidate, f"pinned, but {reason}")
    return None


def _unmeasured(lookup: _Lookup, candidate: Candidate, source: Source, why: str) -> Decision:
    """A decision that does not rest on measurements, with the numbers if there are some."""
    decision = Decision(candidate=candidate, source=source, why=why)
    for row in lookup.fresh(lookup.rows_of_problem()):
        if row.candidate == candidate:
            library_us = row.latency_p50_us if row.is_library else row.baseline_p50_us  # never slower than itself
            return replace(decision, latency_us=row.latency_p50_us, library_us=library_us, **_resting_on(row))
    return decision


def _exact(lookup: _Lookup) -> Decision | None:
    rows = lookup.rows_of_problem()
    # The finals were measured with all SMs; the best on a few of them is seldom among them.
    found = lookup.pool(rows, lookup.failed_at_rows(), every_trial=lookup.max_sms is not None)
    if not found.scored:
        return None
    return _settle(lookup, found, rows, "exact", "", near=partial(_near_pools, lookup, lookup.family))


def _interpolated(lookup: _Lookup, reach: int | None) -> Decision | None:
    """Ask the family, then related ones; `reach` None lifts the bound on extrapolation."""
    related = lookup.tables.related(lookup.problem, borrowed=lookup.borrowed)
    for family, relaxed in related:
        if decision := _from_family(lookup, family, reach, f" with {relaxed}" if relaxed else ""):
            return decision
    for family, relaxed in related:
        if rows := _nearest_shape(lookup, family, reach):
            text = f"as at the nearest measured shape, {format_shape(rows[0].problem.shape)}"
            found = _nearby_winner(lookup, family, rows, f"{text}{f' with {relaxed}' if relaxed else ''}: ")
            if lookup.borrowed or not lookup.catalog.shape_reach(found.candidate):
                return found
            if decision := _once_checked(lookup, found):
                return decision
    return None


def _once_checked(lookup: _Lookup, decision: Decision) -> Decision | None:
    """The decision for a candidate that its first call checks; None if it lost its check here."""
    if decision.is_unproven:  # by rule of thumb, which has asked
        return decision
    if why := lookup.why_lost(decision.candidate):
        lookup.pass_over(decision.candidate, why)
        return None
    is_due = lookup.is_unchecked(decision.candidate)
    why = f"{decision.why}; its first call on this machine checks it" if is_due else decision.why
    return replace(decision, why=why, is_unproven=True)


def _from_family(lookup: _Lookup, family: Family, reach: int | None, relaxed: str) -> Decision | None:
    """Decide from one family's rows: at the size itself, between two sizes, or as at the nearest."""
    sizes = family.fresh_sizes(lookup.problem.shape)
    if sizes is None:
        return None
    size, failed = lookup.size, lookup.failed_near(family)
    here = sizes.rows.get(size, _NO_ROWS)
    if lookup.serves(here, failed):
        found = lookup.pool(here, failed)
        text = f"measured at {_named(here, size)}{relaxed}: " if lookup.with_reasons else ""
        near = partial(_near_pools, lookup, family)
        return _settle(lookup, found, here, "interpolated", text, near=near)
    rows_of = sizes.rows
    larger = (s for s in sizes.above(size) if lookup.serves(rows_of[s], failed))
    below = next((s for s in sizes.below(size) if lookup.serves(rows_of[s], failed)), None)
    above = next(larger, None)
    if below is not None and above is not None and above <= MAX_GAP * below:
        after = next(larger, None)
        after = after if after is not None and after <= MAX_GAP * size else None
        verdicts = lookup.verdicts(sizes.challengers(below, above, after), failed)
        between = sizes.between(below, above, after, verdicts)
        found = between.at(size, lookup.problem, lookup.catalog.num_rounds)
        if found.scored:
            rows = [*rows_of[below], *rows_of[above]]
            lookup.report(rows, failed)
            ends_named = (
                f"{_named(rows_of[below], below)} and {_named(rows_of[above], above)}" if lookup.with_reasons else ""
            )
            return _settle(lookup, found, rows, "interpolated", f"predicted between {ends_named}{relaxed}: ")
    ends = [s for s in (below, above) if s is not None]
    if not ends:
        return None
    nearest = min(ends, key=lambda s: (max(s, size) / min(s, size), s))
    if reach is None or max(nearest, size) <= reach * min(nearest, size):
        rows = rows_of[nearest]
        text = f"as at the nearest measured size, {_named(rows, nearest)}{relaxed}: " if lookup.with_reasons else ""
        return _nearby_winner(lookup, family, rows, text)
    return None


def _named(rows: Sequence[Row], size: int) -> str:
    """The size of rows as a person says it: bytes of a collective, the shape of a GEMM."""
    shape = rows[0].problem.shape
    return format_shape(shape) if len(shape) == GEMM_EXTENTS else format_bytes(size)


def _nearby_winner(lookup: _Lookup, family: Family, rows: Rows, text: str) -> Decision:
    """The winner of another size or shape; its time at this one is not known."""
    found = lookup.pool(rows, lookup.failed_near(family), every_trial=True)
    return replace(_settle(lookup, found, rows, "interpolated", text), **_NO_TIMES)


def _near_pools(lookup: _Lookup, family: Family) -> list[Pool]:
    """The pools of the nearest two sizes below and above."""
    sizes = family.fresh_sizes(lookup.problem.shape)
    if sizes is None:
        return []
    nearby, predicting, failed = sizes.rows, lookup.failed_near(family), lookup.failed_at_rows()
    below, above = (
        list(islice((s for s in side if lookup.serves(nearby[s], predicting)), 2))
        for side in (sizes.below(lookup.size), sizes.above(lookup.size))
    )
    found = [nearby[s] for s in (*reversed(below), *above)]
    return [rows.pool(lookup.verdicts(rows.challengers, failed), every_trial=False) for rows in found]


def _nearest_shape(lookup: _Lookup, family: Family, reach: int | None) -> Rows:
    """Rows of the nearest shape of 3 or 4 extents within reach where some challenger may be used."""
    asked = lookup.problem.shape
    if len(asked) < GEMM_EXTENTS or 0 in asked:
        return _NO_ROWS
    near: list[tuple[float, Shape]] = []
    spec = find_op(lookup.problem.op)
    reaches = (spec.shape_reach if spec is not None and not lookup.borrowed else ()) or (reach or 0,) * len(asked)
    for shape in family.fresh_by_shape:
        factors = [max(x, y, 1) / max(min(x, y), 1) for x, y in zip(shape, asked, strict=True)]
        if reach is None or all(factor <= most for factor, most in zip(factors, reaches, strict=True)):
            near.append((math.prod(factors), shape))
    failed = lookup.failed_near(family)
    nearest = (family.fresh_by_shape[shape] for _, shape in sorted(near))
    return next((rows for rows in nearest if lookup.serves(rows, failed)), _NO_ROWS)


def _measured(lookup: _Lookup, reach: int | None) -> Decision | None:
    return _exact(lookup) or _interpolated(lookup, reach)


def _by_rows(lookup: _Lookup) -> Decision | None:
    """The answer of rows, of this hardware or borrowed."""
    decision = _measured(lookup, MAX_REACH)
    if decision is not None:
        merely_reaches = decision.source in ("interpolated", "heuristic") and decision.latency_us is None
        merely_reaches = merely_reaches and lookup.tables.borrows
        lent = _lent(lookup, _exact(replace(lookup, borrowed=True))) if merely_reaches else None
        return decision if lent is None or lent.candidate == lookup.library else lent
    return _borrowed(lookup, MAX_REACH) or _as_in_graphs(lookup)


def _borrowed(lookup: _Lookup, reach: int | None) -> Decision | None:
    """The answer of rows of other hardware."""
    return _lent(lookup, _measured(replace(lookup, borrowed=True), reach)) if lookup.tables.borrows else None


def _lent(lookup: _Lookup, decision: Decision | None) -> Decision | None:
    """A decision that rests on borrowed rows as such, or the library, if it won the candidate's check here."""
    if decision is None:
        return None
    why, candidate = f"borrowed from {decision.environment}, where {decision.why}", decision.candidate
    if candidate != lookup.library:
        if (lost := lookup.why_lost(candidate)) and lookup.library_admitted:
            lookup.pass_over(candidate, lost)
            why = f"the library: {candidate} is {why}, but {lost}"
            decision = replace(decision, candidate=lookup.library, runner_up=candidate)
        elif lookup.is_unchecked(candidate):
            why = f"{why}; its first call on this machine checks it"
    return replace(decision, source="borrowed", why=why, **_NO_TIMES)


def _as_in_graphs(lookup: _Lookup) -> Decision | None:
    """An eager call as in graphs: the GPU does the same in both, and what the host adds favours no kernel."""
    if lookup.problem.mode != "eager":
        return None
    captured = replace(lookup, problem=replace(lookup.problem, mode="graph"))
    lent = decision = _measured(captured, MAX_REACH)
    if decision is None:
        lent = _borrowed(captured, MAX_REACH)
    if lent is None:
        return None
    why = f"not tuned outside of graphs; in graphs: {lent.why}"
    return replace(lent, source="heuristic" if decision else "borrowed", why=why, **_NO_TIMES)


def _rule_of_thumb(lookup: _Lookup, rows: Iterable[Row] | None) -> Decision | None:
    """Choose a variant by rule of thumb; None if no variant has such a rule here, or if rows say how fast it is.

    These are the rows that might have answered the problem, or None for any of the op.
    """
    candidate = lookup.catalog.default_beating_library(lookup.problem, lookup.max_sms)
    if candidate is None or lookup.why_excluded(candidate) or lookup.why_failed(candidate):
        return None
    measured = lookup.tables.measured if rows is None else {row.candidate.variant for row in lookup.fresh(rows)}
    if candidate.variant in measured or candidate in lookup.tables.failed(lookup.problem):
        return None
    what = f"{candidate.variant} was not" if measured or rows is None else "nothing of this size is"
    why = f"{what} measured here, so {candidate} runs by rule of thumb; `tunedcomm tune` measures it"
    decision = _unmeasured(lookup, candidate, "heuristic", why)
    if not lookup.catalog.shape_reach(candidate):
        return decision
    return _once_checked(lookup, decision) if lookup.library_admitted else replace(decision, is_unproven=True)


def _unmeasured_default(lookup: _Lookup) -> Decision | None:
    """Where the library may not run, the default config of the first variant that can; None if none can."""
    failed = lookup.tables.failed(lookup.problem)
    for candidate in lookup.catalog.defaults(lookup.problem, lookup.max_sms):
        # The library's own transfers take as many SMs as they like.
        free = lookup.max_sms is not None and lookup.catalog.num_blocks(lookup.requested, candidate) < 0
        judge = _judge(lookup.tables, lookup.catalog, lookup.policy, None) if free else lookup.judge
        excluded = judge.check(candidate)(lookup.requested, lookup.in_any_mode)
        if reason := excluded or failed.get(candidate) or lookup.why_failed(candidate):
            lookup.pass_over(candidate, reason)
            continue
        why = (
            f"nothing of this kind is measured here, and policy {lookup.policy!r} excludes the library, so the default"
        )
        return _unmeasured(
            lookup, candidate, "heuristic", f"{why} of {candidate.variant} runs; `tunedcomm tune` measures it"
        )
    return None


def _library(lookup: _Lookup) -> Decision:
    # Some ops have a library that is ordered itself.
    admitted = admits(lookup.policy, lookup.catalog.numerics(lookup.problem.op, "library") or "library")
    if admitted and not lookup.with_reasons:
        return _unmeasured(lookup, lookup.library, "library", "")
    advice = "; `tunedcomm tune` measures it"
    if by_size := lookup.family.every_size.rows:
        size = lookup.size
        nearest = min(by_size, key=lambda s: (abs(math.log(s / size)), s))
        rows = by_size[nearest]
        lookup.report(rows, lookup.failed_near(lookup.family))
        why = f"what is measured at {_named(rows, nearest)}, the nearest size, may not serve this one"
        if any(row.problem == lookup.problem for row in rows):
            why, advice = "of what is measured at this very size only the library may serve", ""
    else:
        why = "nothing of this kind is measured for this hardware and world size"
    if not admitted:
        refused = f"policy {lookup.policy!r} admits no candidate for {lookup.problem}"
        if reason := lookup.catalog.why_no_kernel(lookup.problem, lookup.policy):
            raise InfeasibleError(f"{refused}, and tuning would find none: {reason}. Allow numerics='default'")
        tried = {candidate.variant: reason for candidate, reason in lookup.passed.items()}
        why = "; ".join([why, *(f"{name}: {reason}" for name, reason in tried.items())])
        raise InfeasibleError(f"{refused}: {why}; run `tunedcomm tune`, or allow numerics='default'")
    return _unmeasured(lookup, lookup.library, "library", f"the library: {why}{advice}")


# The choice within a pool.


def _settle(
    lookup: _Lookup,
    found: Pool,
    rows: Sequence[Row],
    source: Source,
    text: str,
    *,
    near: Callable[[], Sequence[Pool]] | None = None,
) -> Decision:
    """Choose among the challengers of a pool and the library, whose rows are among `rows`.

    `text` begins the explanation. `near` gives the pools of the neighbouring sizes, and is called only to break a tie;
    where it is None, the least score wins.
    """
    if lookup.with_reasons:
        for row, reason in found.outranked:
            lookup.pass_over(row.candidate, reason)
    beating: list[Scored] = []
    for scored in found.scored:
        # Without reasons nobody asks about those that cannot tie with the best.
        if beating and not lookup.with_reasons and (not near or scored.score > beating[0].score * (1 + MAX_NOISE)):
            break
        if _beats_library(lookup, found, scored):
            beating.append(scored)
    if not beating:
        return _library_wins(lookup, found, rows, source, text)
    winner = best = beating[0]
    tied = [s for s in beating if s.score <= best.score * (1 + max(best.noise, s.noise))] if near else []
    if near and len(tied) > 1:
        pools = near()
        winner = min(tied, key=lambda scored: _preference(scored, pools))
    runner_up = next((scored for scored in found.scored if scored is not winner), None)
    why = ""
    if lookup.with_reasons:
        against = f"µs against {format_us(winner.score)} µs of {winner.candidate}"
        for other in beating:
            tie = "a tie within the noise, decided by the neighbouring sizes and the name: " if other in tied else ""
            lookup.pass_over(other.candidate, f"{tie}{format_us(other.score)} {against}")
        why = text + _margins(winner, found.library_us, runner_up, tied)
    return Decision(
        candidate=winner.candidate,
        source=source,
        why=why,
        latency_us=winner.score,
        library_us=found.library_us,
        runner_up=runner_up.candidate if runner_up else None,
        runner_up_us=runner_up.score if runner_up else None,
        **_resting_on(winner.row),
    )


def _beats_library(lookup: _Lookup, found: Pool, scored: Scored) -> bool:
    if not lookup.library_admitted or lookup.max_sms is not None:
        return True
    if found.library_us is None:
        lookup.pass_over(scored.candidate, "was never compared with the library")
        return False
    best_us, least, what = found.library_us, scored.noise, "more than the noise"
    if lookup.borrowed:
        best_us *= _share_in_place(lookup, scored.row)
        least, what = max(least, 1 - 1 / _BORROWED_MARGIN), "the margin of borrowed rows"
    if scored.score < best_us * (1 - least):
        return True
    if lookup.with_reasons:
        times = f"{format_us(scored.score)} µs is not less than the library's {format_us(best_us)} µs"
        lookup.pass_over(scored.candidate, f"{times} by {what} of {least:.1%}")
    return False


def _share_in_place(lookup: _Lookup, row: Row) -> float:
    """The library's time in place over its time beside `row`; 1 where that is its best form."""
    asked = replace(row.problem, in_place=True)
    rows = lookup.tables.family(asked, borrowed=True).by_shape.get(asked.shape, ())
    in_place_us = median_baseline(rows)
    if row.problem.in_place or in_place_us is None or row.baseline_p50_us is None:
        return 1.0
    return min(1.0, in_place_us / row.baseline_p50_us)


def _library_wins(lookup: _Lookup, found: Pool, rows: Sequence[Row], source: Source, text: str) -> Decision:
    """The library, unless the variant that runs by rule of thumb was not compared with it."""
    if not lookup.borrowed and (unmeasured := _rule_of_thumb(lookup, rows)):
        return unmeasured
    measured = min((row for row in rows if row.is_library), key=lambda row: row.tier, default=None)
    nearest, why = found.scored[0], ""
    if lookup.with_reasons:
        known = "no challenger was compared with it"
        if found.library_us is not None:
            known = f"at {format_us(found.library_us)} µs no challenger beats it by more than the noise"
        why = f"{text}the library: {known}; the nearest is {nearest.candidate} at {format_us(nearest.score)} µs"
    return Decision(
        candidate=lookup.library,
        source=source,
        why=why,
        latency_us=found.library_us,
        library_us=found.library_us,
        runner_up=nearest.candidate,
        runner_up_us=nearest.score,
        **_resting_on(measured or nearest.row),
    )


def _preference(scored: Scored, pools: Sequence[Pool]) -> tuple[int, int, str]:
    """Order of tied challengers: most sizes nearby where they are about the best, least lost there, name."""
    wins, lost = 0, 0.0
    for near in pools:
        nearby = next((s for s in near.scored if s.candidate == scored.candidate), None)
        if nearby is None:
            lost += 1.0
            continue
        best = near.scored[0]
        wins += nearby.score <= best.score * (1 + max(best.noise, nearby.noise))
        lost += nearby.score / best.score - 1
    return (-wins, round(100 * lost / max(1, len(pools))), str(scored.candidate))


def _margins(winner: Scored, library_us: float | None, runner_up: Scored | None, tied: Sequence[Scored]) -> str:
    """Say by which factor the winner leads, and where it was measured."""
    parts = [f"{winner.candidate} is expected to take {format_us(winner.score)} µs"]
    if library_us is not None:
        parts.append(f"{library_us / winner.score:.2f}x as fast as the library ({format_us(library_us)} µs)")
    if runner_up is not None:
        named = f"the runner-up {runner_up.candidate} ({format_us(runner_up.score)} µs)"
        slower = f"{winner.score / runner_up.score - 1:.1%} slower than {named}"
        if runner_up.score >= winner.score:
            parts.append(f"{runner_up.score / winner.score:.2f}x as fast as {named}")
        elif runner_up in tied:
            level = max(winner.noise, runner_up.noise)
            why = f"a tie within the noise of {level:.1%} that the neighbouring sizes and the name decide"
            parts.append(f"{slower}, {why}")
        else:
            why = f"which does not beat the library by more than its noise of {runner_up.noise:.1%}"
            parts.append(f"{slower}, {why}")
    trial = "" if winner.row.trial_id is None else f"trial {winner.row.trial_id} of "
    return f"{', '.join(parts)}; {trial}the {winner.row.layer} layer"
