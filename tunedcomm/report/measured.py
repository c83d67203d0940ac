"""What a report draws: measurements of contenders, wherever they come from, and which of them make one figure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tunedcomm import metrics
from tunedcomm.shapes import parse_shape

__all__ = ["CHOSEN", "LIBRARY", "TUNED", "Group", "Line", "Measured", "geomean", "group_up", "lines", "speedup"]

LIBRARY = "library"
# What dispatch ran, in a benchmark.
TUNED = "tuned"
# What dispatch would run by a database: a mark on the variants' lines, no line of its own.
CHOSEN = "chosen"
_ORDER = {TUNED: 0, LIBRARY: 1}


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
        error: ||out - ref|| / ||ref||; None if it was not checked.
        date, run_id: when and in which run.
        is_chosen: what dispatch runs here.
        why: the reason, where it is chosen.
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
    error: float | None = None
    date: str = ""
    run_id: str = ""
    is_chosen: bool = False
    why: str = ""

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
    newest: dict[tuple[Group, str, str], Measured] = {}
    for one in found:
        key = (one.group, one.shape, one.contender)
        other = newest.get(key)
        if other is None or _rank(one) > _rank(other):
            newest[key] = one
    grouped: dict[Group, list[Measured]] = {}
    for one in newest.values():
        grouped.setdefault(one.group, []).append(one)
    return {group: _with_library(grouped[group]) for group in sorted(grouped)}


def _rank(one: Measured) -> tuple[str, bool, float]:
    return one.date, one.is_chosen, -one.latency_p50_us


def _with_library(found: list[Measured]) -> list[Measured]:
    """The library's time added where only its own row says it."""
    by_shape = {one.shape: one.latency_p50_us for one in found if one.contender == LIBRARY}
    return [
        one if one.library_us is not None else replace(one, library_us=by_shape.get(one.shape))
        for one in sorted(found, key=lambda one: (one.message_bytes, one.shape, one.contender))
    ]


def lines(found: Sequence[Measured]) -> list[Line]:
    """The contenders of one figure: what dispatch runs first, the library second, the others by name."""
    by_name: dict[str, list[Measured]] = {}
    for one in found:
        by_name.setdefault(one.contender, []).append(one)
    names = sorted(by_name, key=lambda name: (_ORDER.get(name, 2), name))
    return [Line(name, tuple(sorted(by_name[name], key=lambda one: one.message_bytes))) for name in names]


def speedup(found: Sequence[Measured]) -> dict[str, float]:
    """Shape to the library's time over that of what dispatch runs, where both are known.

    Where nothing says what dispatch runs, the fastest contender stands for it.
    """
    by_shape: dict[str, list[Measured]] = {}
    for one in found:
        by_shape.setdefault(one.shape, []).append(one)
    ratios = {}
    for shape, members in by_shape.items():
        ours = [one for one in members if one.is_chosen or one.contender == TUNED]
        best = min(ours or members, key=lambda one: one.latency_p50_us)
        if best.library_us:
            ratios[shape] = best.library_us / best.latency_p50_us
    return ratios


def geomean(values: Iterable[float]) -> float | None:
    """The geometric mean; None of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None
