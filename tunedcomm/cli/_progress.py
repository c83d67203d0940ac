"""How a sweep is shown while it runs: one live view on a terminal, plain lines otherwise; on stderr either way."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tunedcomm.cli._output import format_ratio, format_us, note

if TYPE_CHECKING:
    from tunedcomm.tuner.sweep import Progress

__all__ = ["PlainLines", "describe", "shown"]

# Between problems a long search still says now and then that it is alive.
QUIET_S = 30.0


def describe(progress: Progress) -> str:
    """Where the sweep stands, in one line."""
    parts = [f"[{progress.problems_done}/{progress.problems}]"]
    if progress.problem is None:
        parts.append("starting")
    else:
        speed_up = format_ratio(progress.library_us, progress.best_us)
        parts.append(f"{'finals, ' if progress.final else ''}{progress.problem}:")
        parts.append(
            f"best {format_us(progress.best_us)} µs, library {format_us(progress.library_us)} µs ({speed_up}),"
        )
    parts.append(f"{progress.trials} trials")
    if progress.failures:
        parts.append("(" + ", ".join(f"{count} {status}" for status, count in sorted(progress.failures.items())) + ")")
    return " ".join(parts)


class PlainLines:
    """A line for each problem, and one in every `QUIET_S` seconds."""

    def __init__(self, write: Callable[[str], None] = note) -> None:
        self._write = write
        self._last: Progress | None = None
        self._written_s = 0.0

    def __call__(self, progress: Progress) -> None:
        """Write what has come to an end since the last call."""
        last, self._last = self._last, progress
        if (
            last is not None
            and last.problem is not None
            and (last.problem, last.final) != (progress.problem, progress.final)
        ):
            self._line(last)
        elif progress.elapsed_s - self._written_s > QUIET_S:
            self._line(progress)

    def finish(self) -> None:
        """Write where the sweep ended."""
        if self._last is not None:
            self._line(self._last)

    def _line(self, progress: Progress) -> None:
        self._written_s = max(self._written_s, progress.elapsed_s)
        self._write(describe(progress))


@contextmanager
def shown() -> Iterator[Callable[[Progress], None]]:
    """A progress callback for `sweep`, for as long as the sweep runs."""
    if not sys.stderr.isatty():
        lines = PlainLines()
        yield lines
        lines.finish()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Bars(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task("starting", total=None)

        def update(progress: Progress) -> None:
            running = f" {progress.candidate}" if progress.candidate is not None else ""
            rate = f" {progress.trials_per_minute:.0f}/min"
            text = describe(progress).partition("] ")[2] + rate + running
            bars.update(task, total=progress.problems, completed=progress.problems_done, description=text)

        yield update
