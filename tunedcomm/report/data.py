"""The data of a report: measurements from CSV files and databases, grouped by figure."""

from __future__ import annotations

import csv
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from tunedcomm import kernels
from tunedcomm.bench.csv import NEEDED, known_link_gb_s
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.records import Run, Trial
from tunedcomm.dispatch.decide import decide
from tunedcomm.hardware import Environment
from tunedcomm.metrics import algbw_gb_s
from tunedcomm.selection.score import Pool
from tunedcomm.selection.select import Decision, Registered, measured_pool
from tunedcomm.spec import Candidate, InputKind, Mode, OpSpec, Problem, find_op, format_shape, parse_shape, variants
from tunedcomm.symm.layout import limits_for

LIBRARY = "library"
# Contender of a benchmark: the candidate that dispatch ran.
TUNED = "tuned"
# The candidate that dispatch runs by a database: a mark on the variants' lines, no line of its own.
CHOSEN = "chosen"
_ORDER = {TUNED: 0, LIBRARY: 1}
# The library's times in two runs differ by this factor if a host was throttled; a ratio to one of them says little.
_UNSTEADY = 1.5
_RULES = ("world_size", "rule", "regret_mean", "regret_worst")
_HOST_COST = "host_cost:"
_SOFTWARE = ("gpu", "fabric", "driver", "torch", "triton", "nccl", "tunedcomm")


@dataclass(frozen=True, slots=True)
class Group:
    """The measurements of one figure.

    Attributes:
        origin: the CSV file's name, or the database's layer.
        common: the common fields of the problems, as a problem without a shape.
        gpu, fabric: hardware of the measurements.
        is_host_time: the times are the host's time of a call, not the GPUs' time.
        library_copies: the library's times include a copy, as databases have them; `bench` measures it in place.
    """

    origin: str
    common: Problem
    gpu: str = ""
    fabric: str = ""
    is_host_time: bool = False
    library_copies: bool = False

    @property
    def op(self) -> str:
        """The op's name."""
        return self.common.op

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.common.world_size

    @property
    def spec(self) -> OpSpec | None:
        """The op; None if this tunedcomm does not have it."""
        kernels.discover()
        return find_op(self.op)

    @property
    def is_gemm(self) -> bool:
        """True for problems with extents MxNxK, which no single size orders."""
        return self.spec is not None and self.spec.is_gemm

    @property
    def title(self) -> str:
        """`all_reduce, bfloat16, 4 × NVIDIA H200, graph`, and every unusual option."""
        common = self.common
        where = f"{self.world_size} × {self.gpu}" if self.gpu else f"{self.world_size} ranks"
        more = [
            common.reduction if common.reduction not in ("", "sum") else "",
            f"{common.input_kind} input" if common.input_kind != "plain" else "",
            "in place" if common.in_place else "",
            f"layout {common.layout}" if common.layout else "",
            "time on the host" if self.is_host_time else "",
        ]
        return ", ".join([self.op, common.dtype, where, common.mode, *filter(None, more)])

    @property
    def slug(self) -> str:
        """The title as a file name or an anchor."""
        text = f"{self.op} {self.common.dtype} x{self.world_size} {self.title.split(', ', 3)[-1]} {self.origin}"
        return "-".join("".join(c if c.isalnum() or c == "_" else " " for c in text.lower()).split())

    @property
    def library(self) -> str:
        """`NCCL, then PyTorch operators, not compiled`; `the library` of an op that this tunedcomm does not have."""
        if self.spec is None or (found := variants(self.op).get(LIBRARY)) is None:
            return "the library"
        kept, dropped = (" on CPUs", " on GPUs") if self.fabric == "host" else (" on GPUs", " on CPUs")
        parts = [part for part in found.summary.split(", ") if not part.endswith(dropped)]
        summary = ", ".join(part.removesuffix(kept) for part in parts)
        if self.library_copies:
            return f"{summary} out of place, its copy included"
        return f"{summary}, not compiled" if ", then " in summary else summary

    def link_gb_s(self, given: float | None = None) -> float | None:
        """The most that one GPU sends to its peers, in 1e9 bytes/s, by default as measured; None if not known."""
        if self.is_host_time or self.world_size < 2:
            return None
        return given if given is not None else known_link_gb_s(self.gpu, self.fabric)

    @property
    def sort_key(self) -> tuple[Any, ...]:
        """By op: collectives of one extent first, then ops of more extents; GEMMs, then unknown ops last."""
        extents = 0 if self.spec is None else self.spec.rank_of_shape
        return self.spec is None, self.is_gemm, extents, self.op, self.origin, self.world_size, self.title


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One contender at one problem.

    Attributes:
        shape: the shape as text, `98304` or `4096x8192x3584`.
        message_bytes: bytes by which sizes are compared.
        contender: `tuned`, `library`, a variant or a peer.
        config: the candidate that ran, in words.
        latency_p10_us, latency_p50_us, latency_p90_us: percentiles of the slowest rank.
        library_us: the library's median in the same run; None where not known.
        ratio: the library's time over this one as dispatch compares them; None: compare with `library_us`.
        date, run_id: date and run of the measurement.
        is_chosen: dispatch runs this contender.
        why: the reason of dispatch, if `is_chosen`.
        is_unsteady: the library's time beside this contender differs by a half from the library's own row.
    """

    group: Group
    shape: str
    message_bytes: int
    contender: str
    latency_p50_us: float
    config: str = ""
    latency_p10_us: float | None = None
    latency_p90_us: float | None = None
    library_us: float | None = None
    ratio: float | None = None
    date: str = ""
    run_id: str = ""
    is_chosen: bool = False
    why: str = ""
    is_unsteady: bool = False

    @property
    def busbw_gb_s(self) -> float | None:
        """Bus bandwidth by nccl-tests' definition; None where the op has none."""
        spec, world_size = self.group.spec, self.group.world_size
        if self.group.is_host_time or not self.message_bytes or spec is None or spec.busbw_factor is None:
            return None
        payload = spec.payload_bytes(self.message_bytes, world_size)
        return algbw_gb_s(payload, self.latency_p50_us) * spec.busbw_factor(world_size)

    @property
    def over_library(self) -> float | None:
        """The library's time over this one, as dispatch compares them; None if unknown."""
        if self.ratio is not None or self.library_us is None:
            return self.ratio
        return self.library_us / self.latency_p50_us

    @property
    def over_library_text(self) -> str:
        """For tables."""
        return "–" if self.over_library is None else f"{self.over_library:.2f}×" + (" ‡" if self.is_unsteady else "")

    @property
    def run(self) -> tuple[Group, str, str, str]:
        """Key of measurements that were made beside each other: one run at one problem."""
        return self.group, self.shape, self.date, self.run_id


def group_up(found: Iterable[Measured]) -> dict[Group, list[Measured]]:
    """Measurements by figure: each contender's fastest one of the newest run at each problem."""
    found = list(found)
    ranked = sorted(found, key=lambda one: (one.date, one.is_chosen, -one.latency_p50_us))
    newest = {(one.group, one.shape, one.contender): one for one in ranked}
    library = {one.run: one.latency_p50_us for one in found if one.contender == LIBRARY}
    grouped: dict[Group, list[Measured]] = {
        group: [] for group in sorted({one.group for one in found}, key=lambda group: group.sort_key)
    }
    for one in sorted(newest.values(), key=lambda one: (one.message_bytes, one.shape, one.contender)):
        library_us = one.library_us or (None if one.ratio else library.get(one.run))
        compared, baseline = replace(one, library_us=library_us), newest.get((one.group, one.shape, LIBRARY))
        against_us = (compared.over_library or 0.0) * one.latency_p50_us
        is_steady = not baseline or not against_us or 1 / _UNSTEADY < against_us / baseline.latency_p50_us < _UNSTEADY
        grouped[one.group].append(replace(compared, is_unsteady=not is_steady))
    return grouped


def lines(found: Sequence[Measured]) -> dict[str, list[Measured]]:
    """The contenders of one figure: dispatch first, the library second, the others by name."""
    by_name: dict[str, list[Measured]] = {}
    for one in sorted(found, key=lambda one: (_ORDER.get(one.contender, 2), one.contender, one.message_bytes)):
        by_name.setdefault(one.contender, []).append(one)
    return by_name


def best_by_shape(found: Sequence[Measured]) -> dict[str, Measured]:
    """Shape to the contender that dispatch runs, where its time over the library's is known.

    The fastest contender stands for dispatch where no row says what dispatch runs.
    """
    by_shape: dict[str, list[Measured]] = {}
    for one in found:
        by_shape.setdefault(one.shape, []).append(one)
    best = {}
    for shape, members in by_shape.items():
        ours = [one for one in members if one.is_chosen or one.contender == TUNED]
        first = min(ours or members, key=lambda one: one.latency_p50_us)
        if first.over_library is not None:
            best[shape] = first
    return best


@dataclass(frozen=True, slots=True)
class RegretRule:
    """Regret of one rule of selection at sizes that were not tuned: its choice's time over the best candidate's."""

    world_size: int
    rule: str
    mean: float
    worst: float
    sizes: str


@dataclass(slots=True)
class BenchFile:
    """One CSV file.

    Attributes:
        name: of the file.
        rows: contenders.
        rules: regret by rule.
        software: software versions of the rows, each once.
        skipped: index of each invalid line to the error.
    """

    name: str
    rows: list[Measured] = field(default_factory=list)
    rules: list[RegretRule] = field(default_factory=list)
    software: list[dict[str, str]] = field(default_factory=list)
    skipped: dict[int, str] = field(default_factory=dict)


def read_csv(path: Path) -> BenchFile:
    """Read one file; invalid lines are skipped and noted.

    Raises:
        ValueError: the file cannot be read, or holds neither rows of `tunedcomm bench` nor a table of regret.
    """
    found = BenchFile(path.name)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, restval="")
            columns = reader.fieldnames or []
            is_rules = all(name in columns for name in _RULES)
            missing = [name for name in NEEDED if name not in columns]
            if missing and not is_rules:
                raise ValueError(
                    f"{path} is not a table that a report can show: it lacks the columns {', '.join(missing)}; give "
                    "files that `tunedcomm bench --csv` or bench/regret.py wrote"
                )
            for row in reader:
                try:
                    if is_rules:
                        found.rules.append(_rule(row))
                    else:
                        found.rows.append(_bench_row(row, found.name))
                        software = {name: row.get(name, "") for name in _SOFTWARE}
                        if software not in found.software:
                            found.software.append(software)
                except (ValueError, TypeError) as error:
                    found.skipped[reader.line_num] = str(error)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return found


def _number(row: Mapping[str, str], name: str) -> float:
    value = float(row[name] or "nan")
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} is {row[name]!r}, not a number > 0")
    return value


def _rule(row: Mapping[str, str]) -> RegretRule:
    mean, worst = _number(row, "regret_mean"), _number(row, "regret_worst")
    return RegretRule(int(row["world_size"] or 0), row["rule"], mean, worst, row.get("sizes", ""))


def _bench_row(row: Mapping[str, str], origin: str) -> Measured:
    contender = row["contender"]
    if not contender:
        raise ValueError("contender is empty")
    if not parse_shape(row["shape"]):
        raise ValueError(f"shape {row['shape']!r} has no extents")
    common = Problem(
        op=row["op"],
        shape=(),
        dtype=row["dtype"],
        world_size=int(row["world_size"]),
        reduction=row.get("reduction", ""),
        input_kind=cast("InputKind", row.get("input_kind") or "plain"),
        in_place=row.get("in_place", "").lower() == "true",
        layout=row.get("layout", ""),
        mode=cast("Mode", row["mode"]),
    )
    is_host_time = contender.startswith(_HOST_COST)
    return Measured(
        group=Group(origin, common, row.get("gpu", ""), row.get("fabric", ""), is_host_time),
        shape=row["shape"],
        message_bytes=int(row["message_bytes"]),
        contender=contender.removeprefix(_HOST_COST),
        config=row.get("config", ""),
        latency_p50_us=_number(row, "latency_p50_us"),
        latency_p10_us=float(text) if (text := row.get("latency_p10_us")) else None,
        latency_p90_us=float(text) if (text := row.get("latency_p90_us")) else None,
        date=row.get("date", ""),
        run_id=row.get("run_id", ""),
        is_chosen=contender == TUNED,
    )


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One database.

    Attributes:
        name: of its layer, or the file's.
        trials, runs, environments: all of them, oldest first.
    """

    name: str
    trials: tuple[Trial, ...]
    runs: tuple[Run, ...]
    environments: tuple[Environment, ...]


class StoredDispatch:
    """Dispatch by the given databases, on the hardware of their measurements."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        kernels.discover()
        self._snapshot = functools.cache(functools.partial(load_snapshot, layers=layers))

    def decide(self, problem: Problem, environment: Environment) -> tuple[Decision | None, Pool]:
        """Dispatch's decision and the candidates compared; none for an op that this tunedcomm does not have."""
        if find_op(problem.op) is None:
            return None, Pool((), None)
        snapshot = self._snapshot(environment, problem.world_size)
        limits = limits_for(environment, problem.world_size)
        pool = measured_pool(snapshot, problem, Registered(limits, kernels.source_hash_of))
        return decide(problem, snapshot, limits), pool


def measurements(stored: StoredFile, dispatch: StoredDispatch) -> list[Measured]:
    """The best trial of each variant at each problem, with a mark on the one that dispatch chooses.

    Finals count before searches, as in dispatch. The chosen config stands for its variant even where another config of
    the variant was faster.
    """
    ran = [trial for trial in stored.trials if trial.status == "ok" and trial.latency_p50_us is not None]
    best: dict[tuple[Environment, Problem], dict[Candidate, Trial]] = {}
    # A candidate's last final counts.
    for trial in sorted(ran, key=lambda trial: (trial.final, trial.created_at)):
        best.setdefault((trial.environment, trial.problem), {})[trial.candidate] = trial
    return [
        one
        for (environment, problem), trials in best.items()
        for one in _of_problem(stored.name, problem, environment, trials, dispatch)
    ]


def _of_problem(
    origin: str, problem: Problem, environment: Environment, trials: dict[Candidate, Trial], dispatch: StoredDispatch
) -> Iterable[Measured]:
    spec, (decision, pool) = find_op(problem.op), dispatch.decide(problem, environment)
    scored = {one.candidate: one for one in pool.scored}
    chosen = None if decision is None else decision.candidate

    def rank(trial: Trial) -> tuple[bool, bool, float]:
        """Sort key: first the trials that dispatch compares, by score, then the others, finals first."""
        found = scored.get(trial.candidate)
        assert trial.latency_p50_us is not None
        return found is None, not trial.final, trial.latency_p50_us if found is None else found.score

    def ratio(trial: Trial) -> float | None:
        """The library's score over the trial's score; None where dispatch compares other rows."""
        found = scored.get(trial.candidate)
        if trial.variant == LIBRARY or found is None or pool.library_us is None:
            return None
        return pool.library_us / found.score if found.row.latency_p50_us == trial.latency_p50_us else None

    kept: dict[str, Trial] = {}
    for trial in sorted(trials.values(), key=rank):
        kept.setdefault(trial.variant, trial)
    if chosen in trials:
        kept[chosen.variant] = trials[chosen]
    for name, trial in kept.items():
        assert trial.latency_p50_us is not None
        is_chosen = chosen is not None and (chosen == trial.candidate or name == LIBRARY == chosen.variant)
        common, copies = replace(problem, shape=()), spec is not None and spec.library_copies(problem)
        yield Measured(
            group=Group(origin, common, environment.gpu, environment.fabric, library_copies=copies),
            shape=format_shape(problem.shape),
            message_bytes=problem.nbytes if spec is None else spec.message_bytes(problem),
            contender=name,
            config=str(trial.candidate),
            latency_p50_us=trial.latency_p50_us,
            latency_p10_us=trial.latency_p10_us,
            latency_p90_us=trial.latency_p90_us,
            library_us=trial.library_us,
            ratio=ratio(trial),
            date=trial.created_at.isoformat(timespec="seconds"),
            run_id="" if trial.run_id is None else str(trial.run_id),
            is_chosen=is_chosen,
            why=decision.why if decision is not None and is_chosen else "",
        )


@dataclass(slots=True)
class Material:
    """Everything that a report shows.

    Attributes:
        files: the CSV files.
        databases: the databases, in their order.
        bench, stored: measurements by figure, of the files and of the databases.
        link_gb_s: the link speed that the caller gave; None: the stored value of the hardware.
    """

    files: list[BenchFile] = field(default_factory=list)
    databases: list[StoredFile] = field(default_factory=list)
    bench: dict[Group, list[Measured]] = field(default_factory=dict)
    stored: dict[Group, list[Measured]] = field(default_factory=dict)
    link_gb_s: float | None = None


def gather(
    layers: Sequence[Layer],
    csv_files: Sequence[Path],
    *,
    op: str | None = None,
    is_wanted: Callable[[Environment], bool] = lambda there: True,
    link_gb_s: float | None = None,
) -> Material:
    """Read databases and CSV files.

    Args:
        layers: databases to read, nearest first; dispatch chooses by all of them.
        csv_files: written by `tunedcomm bench --csv` or bench/regret.py.
        op: only this op's rows.
        is_wanted: a test of the environments whose stored rows are drawn.
        link_gb_s: the most that one GPU sends to its peers, in 1e9 bytes/s; None: the stored value of the hardware.

    Raises:
        DatabaseError: a database cannot be read.
        ValueError: a file cannot be read, or is neither of these tables.
    """
    material = Material(link_gb_s=link_gb_s)
    material.files = [read_csv(path) for path in csv_files]
    rows = [row for file in material.files for row in file.rows]
    material.bench = group_up(row for row in rows if op in (None, row.group.op))
    dispatch = StoredDispatch(layers)
    names: Counter[str] = Counter()
    for layer in layers:
        name = Path(layer.target).name if "://" not in layer.target else layer.name
        names[name] += 1
        name += f" ({names[name]})" if names[name] > 1 else ""
        with layer.open() as database:
            trials = tuple(trial for trial in database.trials(op=op) if is_wanted(trial.environment))
            used = {trial.environment for trial in trials}
            environments = tuple(there for there in database.environments() if there in used)
            material.databases.append(StoredFile(name, trials, tuple(database.runs()), environments))
    material.stored = group_up(one for stored in material.databases for one in measurements(stored, dispatch))
    return material
