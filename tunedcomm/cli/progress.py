"""Progress on stderr while a command runs: of a sweep a live view on a terminal, lines or JSON otherwise."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from tunedcomm.cli.output import attributes, counted, format_ratio, jsonable, note
from tunedcomm.errors import printable
from tunedcomm.metrics import format_us, plural

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tunedcomm.tuner.gang.supervisor import GangProgress
    from tunedcomm.tuner.search.progress import Progress

# Between problems a long search still says now and then that it is alive.
QUIET_S = 30.0
# Between two JSON lines while nothing comes to an end.
EVENT_S = 1.0
_BAR_WIDTH = 30
# Of a gang that has been silent for so long it is said what is waited for.
WAIT_S = 5.0
_VERBS = {"binding": "bind", "running": "run"}


_event = partial(note, is_whole=True)


def say(text: str, *, as_json: bool) -> None:
    """Write a line on stderr; with --json, an event."""
    note(json.dumps({"event": "note", "text": text}) if as_json else text, is_whole=as_json)


def _failures(failures: Mapping[str, int]) -> str:
    return counted(dict(sorted(failures.items())))


def duration(seconds: float) -> str:
    """`1:00` or `1:01:40`."""
    text = str(timedelta(seconds=round(seconds)))
    return text.removeprefix("0:").removeprefix("0")


def _waiting(gang: GangProgress) -> str:
    """`waiting for lamport(num_blocks=8) to bind, 60 of 120 s`; "" if the gang was heard of a moment ago."""
    if gang.patience_s is None or gang.silent_s < WAIT_S:
        return ""
    what = "a gang to start" if gang.candidate is None else f"{gang.candidate} to {_VERBS.get(gang.phase, gang.phase)}"
    return f"waiting for {what}, {gang.silent_s:.0f} of {gang.patience_s:.0f} s"


def _standing(gang: GangProgress, *, is_over: bool = False) -> str:
    """A gang's problem, and its best time against the library's."""
    best = "nothing was timed" if is_over else "nothing is timed yet"
    if gang.best_us is not None:
        speed_up = format_ratio(gang.library_us, gang.best_us)
        best = f"best {format_us(gang.best_us)} µs, library {format_us(gang.library_us)} µs ({speed_up})"
    return f"{'finals, ' if gang.final else ''}{gang.problem}: {best}"


def describe(progress: Progress, gang: GangProgress | None, *, is_over: bool = False) -> str:
    """Where the sweep stands and what one of its gangs is at, or at the end of a problem found there, in one line."""
    what = "waiting" if progress.problems_done else "starting"
    if gang is not None and gang.problem is not None:
        what = f"{_standing(gang, is_over=is_over)}, {plural(gang.num_trials, 'trial')}"
    failed = f" ({_failures(progress.failures)})" if progress.failures else ""
    trials = f"; {plural(progress.trials, 'trial')} in all{failed}" if progress.trials else ""
    waiting = _waiting(gang) if gang is not None and not is_over else ""
    return f"[{progress.problems_done}/{progress.problems}] {what}{trials}{waiting and '; '}{waiting}"


class Now:
    """Shows a command's current `part: step`: on a terminal in a line that is rewritten, else in a line for each part.

    Long parts get another line in every `QUIET_S` seconds, with the step.
    """

    def __init__(self) -> None:
        self._part = self._text = ""
        self._written_s = 0.0

    def show(self, text: str) -> None:
        """Replace the line; with "" it is gone."""
        part, now_s = text.partition(": ")[0], time.monotonic()
        if sys.stderr.isatty():
            width = shutil.get_terminal_size().columns - 1
            if text != self._text:
                sys.stderr.write(f"\r\x1b[K{printable(text)[:width]}")
                sys.stderr.flush()
        elif part and (part != self._part or now_s - self._written_s > QUIET_S):
            note(part if part != self._part else text)
            self._written_s = now_s
        self._part, self._text = part or self._part, text


class PlainLines:
    """A line for each problem that a gang is done with, and one in every `QUIET_S` seconds."""

    def __init__(self, write: Callable[[str], None] = note) -> None:
        self._write = write
        self._written_s = 0.0

    def __call__(self, progress: Progress) -> None:
        """Write what has come to an end since the last call."""
        lines = [describe(progress, gang, is_over=True) for gang in progress.left]
        if not lines and progress.elapsed_s - self._written_s > QUIET_S:
            lines = [describe(progress, next((gang for gang in progress.gangs if gang.problem is not None), None))]
        for line in lines:
            self._written_s = progress.elapsed_s
            self._write(line)


class JsonLines:
    """One JSON object a line: `progress` once a second, and `end` at the end."""

    def __init__(self, write: Callable[[str], None] = _event) -> None:
        self._write = write
        self._last: Progress | None = None
        self._written_s = -EVENT_S

    def __call__(self, progress: Progress) -> None:
        """Write where the sweep stands, if that is due."""
        self._last = progress
        if progress.elapsed_s - self._written_s >= EVENT_S:
            self._written_s = progress.elapsed_s
            self._line("progress", progress)

    def finish(self) -> None:
        """Write where the sweep ended."""
        if self._last is not None:
            self._line("end", self._last)

    def _line(self, event: str, progress: Progress) -> None:
        left, share = progress.seconds_left, progress.bind_share
        gangs = [
            {
                "slot": gang.slot,
                "step": gang.phase,
                **attributes(gang, "final best_us library_us problem"),
                "candidate": None if gang.candidate is None else str(gang.candidate),
            }
            for gang in progress.gangs
        ]
        values = {
            "event": event,
            "elapsed_s": round(progress.elapsed_s, 3),
            "seconds_left": None if left is None else round(left, 1),
            **attributes(progress, "problems problems_done trials trials_planned"),
            "trials_per_minute": round(progress.trials_per_minute, 1),
            **attributes(progress, "failures num_gangs num_compiled"),
            "bind_share": None if share is None else round(share, 4),
            "gangs": gangs,
        }
        self._write(json.dumps(values, default=jsonable))


def live_view(progress: Progress) -> RenderableType:
    """A bar over the problems, a line for each gang, and what failed."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    head = Table.grid(padding=(0, 1))
    left = "" if progress.seconds_left is None else f", about {duration(progress.seconds_left)} left"
    head.add_row(
        ProgressBar(total=max(progress.problems, 1), completed=progress.problems_done, width=_BAR_WIDTH),
        f"{progress.problems_done}/{plural(progress.problems, 'problem')}",
        f"{plural(progress.trials, 'trial')}, {progress.trials_per_minute:.0f}/min",
        f"{duration(progress.elapsed_s)}{left}",
    )
    lines = []
    for gang in progress.gangs:
        phase = _waiting(gang) or f"{gang.phase} {gang.candidate or ''}".rstrip()
        doing = phase if gang.problem is None else f"{_standing(gang)}; {phase}"
        lines.append(Text(printable(f"gang {gang.slot}: {doing}"), no_wrap=True, overflow="ellipsis"))
    if progress.failures:
        lines.append(Text(f"failed: {_failures(progress.failures)}", style="yellow"))
    return Group(head, *lines)


@contextmanager
def shown(stopped: str, *, as_json: bool = False, is_quiet: bool = False) -> Iterator[Callable[[Progress], None]]:
    """A progress callback for `sweep`, for as long as it runs; `is_quiet` leaves lines out, not the live view."""
    try:
        if as_json:
            lines = JsonLines()
            yield lines
            lines.finish()
            return
        if not sys.stderr.isatty():
            yield PlainLines((lambda line: None) if is_quiet else note)
            return
        from rich.console import Console
        from rich.live import Live

        # Drawn when it is told to, never by a thread of its own: the sweep calls when gangs do not wait for it. What is
        # left in the end is the summary.
        with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
            yield lambda progress: live.update(live_view(progress), refresh=True)
    except KeyboardInterrupt:
        say(f"stopped{stopped}", as_json=as_json)
        raise
