"""What a report draws: measurements of contenders, wherever they come from, and which of them make one figure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from tunedcomm import metrics
from tunedcomm.spec import parse_shape

__all__ = [
    "CHOSEN",
    "LIBRARY",
    "TUNED",
    "Group",
    "Line",
    "Measured",
    "best_by_shape",
    "geomean",
    "group_up",
    "in_order",
    "lines",
    "speedup",
]

LIBRARY = "library"
T = TypeVar("T")
# What dispatch ran, in a benchmark.
TUNED = "tuned"
# What dispatch would run by a database: a mark on the variants' lines, no line of its own.
CHOSEN = "chosen"
_ORDER = {TUNED: 0, LIBRARY: 1}
_OPS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "all_to_all_v",
    "all_reduce_rms_norm",
    "all_reduce_bias",
)
# The library's times in two runs differ so much where a host was throttled, and a ratio to one of them says little.
_UNSTEADY = 1.5


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Group:
    """Measurements that belong into one figure.

    Attributes:
        origin: the CSV file's name, or the database's layer.
        op, dtype, world_size, mode, reduction, input_kind, in_place, layout: what their problems have in common.
        gpu, fabric: where they were measured.
        is_host_time: times that the host spends on a call, not the GPUs.
    """

    origin: str
    op: str
    world_size: int
    dtype: str
    mode: str
    reduction: str = ""
    input_kind: str = "plain"
    in_place: bool = False
    layout: str = ""
    gpu: str = ""
    fabric: str = ""
    is_host_time: bool = False

    @property
    def title(self) -> str:
        """`all_reduce, bfloat16, 4 × NVIDIA H200, graph`, and what is not as usual."""
        where = f"{self.world_size} × {self.gpu}" if self.gpu else f"{self.world_size} ranks"
        more = [
            self.reduction if self.reduction not in ("", "sum") else "",
            f"{self.input_kind} input" if self.input_kind != "plain" else "",
            "in place" if self.in_place else "",
            f"layout {self.layout}" if self.layout else "",
            "time on the host" if self.is_host_time else "",
        ]
        return ", ".join([self.op, self.dtype, where, self.mode, *filter(None, more)])

    @property
    def slug(self) -> str:
        """For file names and anchors."""
        text = f"{self.op} {self.dtype} x{self.world_size} {self.title.split(', ', 3)[-1]} {self.origin}"
        return "-".join("".join(c if c.isalnum() or c == "_" else " " for c in text.lower()).split())

    @property
    def is_gemm(self) -> bool:
        """Problems with extents MxNxK, which no single size orders."""
        return "gemm" in self.op


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One contender at one problem.

    Attributes:
        shape: as it is written, `98304` or `4096x8192x3584`.
        message_bytes: by which sizes are compared.
        contender: `tuned`, `library`, a variant or a peer.
        config: the candidate that ran, in words.
        latency_p10_us, latency_p50_us, latency_p90_us: percentiles of the slowest rank.
        library_us: the library's median in the same run; None where it is not known.
        library_reckoned_us: the library's time that dispatch sets against it, where that is not `library_us`: that is
            not known, was disturbed, or counts by half, being of an eager call.
        error: ||out - ref|| / ||ref||; None if it was not checked.
        date, run_id: when and in which run.
        is_chosen: what dispatch runs here.
        why: the reason, where it is chosen.
        is_unsteady: the library's time that it is compared with is a half more or less than that of its own row.
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
    library_reckoned_us: float | None = None
    error: float | None = None
    date: str = ""
    run_id: str = ""
    is_chosen: bool = False
    why: str = ""
    is_unsteady: bool = False

    @property
    def busbw_gb_s(self) -> float | None:
        """Bus bandwidth by nccl-tests' definition; None where the op has none."""
        op, world_size = self.group.op, self.group.world_size
        if self.group.is_host_time or not self.message_bytes:
            return None
        try:
            payload = metrics.payload_bytes(op, self.message_bytes, world_size)
            return metrics.busbw_gb_s(op, payload, self.latency_p50_us, world_size)
        except ValueError:
            return None

    @property
    def over_library(self) -> float | None:
        """How many times as fast as the library, in a database as dispatch reckons; None where it is not known."""
        library_us = self.library_reckoned_us or self.library_us
        return None if library_us is None else library_us / self.latency_p50_us

    @property
    def over_library_text(self) -> str:
        """For tables."""
        return "–" if self.over_library is None else f"{self.over_library:.2f}×" + (" ‡" if self.is_unsteady else "")

    @property
    def extents(self) -> tuple[int, ...]:
        """The shape as numbers."""
        return parse_shape(self.shape)


@dataclass(frozen=True, slots=True)
class Line:
    """One contender over the sizes of a figure, from small to large."""

    name: str
    points: tuple[Measured, ...]


def group_up(found: Iterable[Measured]) -> dict[Group, list[Measured]]:
    """Measurements by figure, one of each contender at each problem: of the newest run, and there the fastest."""
    found = list(found)
    newest: dict[tuple[Group, str, str], Measured] = {}
    for one in found:
        key = (one.group, one.shape, one.contender)
        other = newest.get(key)
        if other is None or _rank(one) > _rank(other):
            newest[key] = one
    library = {_run_of(one): one.latency_p50_us for one in found if one.contender == LIBRARY}
    shown = {(one.group, one.shape): one.latency_p50_us for one in newest.values() if one.contender == LIBRARY}
    grouped: dict[Group, list[Measured]] = {}
    for one in sorted(newest.values(), key=lambda one: (one.message_bytes, one.shape, one.contender)):
        library_us = one.library_us or (None if one.library_reckoned_us else library.get(_run_of(one)))
        own_us = shown.get((one.group, one.shape))
        is_unsteady = _differ(one.library_reckoned_us or library_us, own_us)
        grouped.setdefault(one.group, []).append(replace(one, library_us=library_us, is_unsteady=is_unsteady))
    return in_order(grouped)


def in_order(groups: Mapping[Group, T]) -> dict[Group, T]:
    """By op as people look for them, GEMMs last; then as groups are ordered."""

    def place(group: Group) -> tuple[bool, int, str, Group]:
        known = _OPS.index(group.op) if group.op in _OPS else len(_OPS)
        return group.is_gemm, known, group.op, group

    return {group: groups[group] for group in sorted(groups, key=place)}


def _rank(one: Measured) -> tuple[str, bool, float]:
    return one.date, one.is_chosen, -one.latency_p50_us


def _differ(one_us: float | None, other_us: float | None) -> bool:
    return bool(one_us and other_us) and not 1 / _UNSTEADY < (one_us or 0.0) / (other_us or 1.0) < _UNSTEADY


def _run_of(one: Measured) -> tuple[Group, str, str, str]:
    return one.group, one.shape, one.date, one.run_id


def lines(found: Sequence[Measured]) -> list[Line]:
    """The contenders of one figure: what dispatch runs first, the library second, the others by name."""
    by_name: dict[str, list[Measured]] = {}
    for one in found:
        by_name.setdefault(one.contender, []).append(one)
    names = sorted(by_name, key=lambda name: (_ORDER.get(name, 2), name))
    return [Line(name, tuple(sorted(by_name[name], key=lambda one: one.message_bytes))) for name in names]


def best_by_shape(found: Sequence[Measured]) -> dict[str, Measured]:
    """Shape to what dispatch runs there, where it is known how it compares with the library.

    Where nothing says what dispatch runs, the fastest contender stands for it.
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


def speedup(found: Sequence[Measured]) -> dict[str, float]:
    """Shape to how many times as fast as the library what dispatch runs is; see `best_by_shape`."""
    return {shape: one.over_library for shape, one in best_by_shape(found).items() if one.over_library is not None}


def geomean(values: Iterable[float]) -> float | None:
    """The geometric mean; None of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None
