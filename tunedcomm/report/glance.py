"""The table at the top of a report: how many times as fast as the library dispatch is, by op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tunedcomm.report.library import library_of
from tunedcomm.report.measured import Group, Measured, best_by_shape, geomean, in_order
from tunedcomm.report.panels import Panel, Table

__all__ = ["glance_panels"]

_COLUMNS = ("problems", "mean", "least", "most", "sizes", "over", "from")
_NOTE = (
    "How many times as fast as the library what dispatch runs is: the geometric mean over the sizes, the least and the "
    "most. Under “over” stands what the library is."
)
_UNCERTAIN = " ‡: the library's time behind it is a half more or less than in its own row: the number is uncertain."


def glance_panels(groups: Mapping[Group, Sequence[Measured]]) -> list[Panel]:
    """One table; none where nothing was compared with the library."""
    rows, is_uncertain = [], False
    for group, found in in_order(groups).items():
        ordered = sorted(best_by_shape(found).values(), key=lambda one: one.over_library or 0.0)
        mean = geomean(one.over_library for one in ordered if one.over_library is not None)
        if mean is None:
            continue
        least, most = ordered[0], ordered[-1]
        is_uncertain = is_uncertain or least.is_unsteady or most.is_unsteady
        ends = (least.over_library_text, most.over_library_text)
        rows.append([group.title, f"{mean:.2f}×", *ends, str(len(ordered)), library_of(group), group.origin])
    if not rows:
        return []
    note = _NOTE + (_UNCERTAIN if is_uncertain else "")
    return [Panel("", "speedups", note, tables=[Table(_COLUMNS, rows, summary="Speed-ups", is_open=True)])]
