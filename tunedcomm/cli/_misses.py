"""What `tunedcomm tune --from-misses` tunes: problems that dispatch met untuned on machines like this one."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from tunedcomm import settings
from tunedcomm.cli._gang import num_gpus
from tunedcomm.cli._output import note
from tunedcomm.errors import DatabaseAccessError, TuningError

if TYPE_CHECKING:
    from pathlib import Path

    from tunedcomm.db.miss_log import HardKey, Miss
    from tunedcomm.hardware import Environment
    from tunedcomm.selection.snapshot import Snapshot
    from tunedcomm.spec import Limits, Problem

__all__ = ["check_alone", "missed_problems"]

# Options that say which problems to tune, as the log does.
_ABOUT_PROBLEMS = (
    "shape",
    "model",
    "tp",
    "tokens",
    "dtype",
    "mode",
    "reduction",
    "input_kind",
    "in_place",
    "layout",
    "scaling",
)
_PRINTED = 20
# A log of this size is made smaller when it is read.
_LARGE_BYTES = 64 << 10

_DETECT = "import json; from tunedcomm.hardware import detect; print(json.dumps(detect(0).to_dict()))"


def check_alone(context: typer.Context) -> None:
    """Refuse options that name problems beside `--from-misses`.

    Raises:
        BadParameter: one of them was given, or no misses are noted at all.
    """
    for name in _ABOUT_PROBLEMS:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(
                f"the log says which problems to tune, so --{name.replace('_', '-')} has no place beside it; run the "
                "two sweeps one after the other",
                param_hint="--from-misses",
            )
    if settings.miss_log() is False:
        raise typer.BadParameter(
            "TUNEDCOMM_MISS_LOG switches the log off; unset it, or name the file to read", param_hint="--from-misses"
        )


def missed_problems(
    op: str | None, *, world_size: int, on_host: bool, database: str | None
) -> dict[str, tuple[Problem, ...]]:
    """Op to its problems in the log that are still not tuned here, most called first; says on stderr what was taken.

    Args:
        op: only this op.
        world_size: of the sweep.
        on_host: the sweep is one of the host backend.
        database: where the sweep stores its trials, if not in the user database.

    Raises:
        DatabaseAccessError: the log cannot be read.
        TuningError: this machine's GPUs cannot be found out.
    """
    from tunedcomm import kernels
    from tunedcomm.db import miss_log
    from tunedcomm.dispatch.communicator import limits_for

    path = miss_log.log_path()
    try:
        misses, skipped = miss_log.read(path)
    except OSError as error:
        raise DatabaseAccessError(
            f"cannot read the log of untuned problems, {path}: {error.strerror or error}; check it, or set "
            "TUNEDCOMM_MISS_LOG to another file"
        ) from None
    if skipped:
        note(f"skipped {skipped} lines of {path} that make no sense")
    kernels.discover()
    environment = _environment(on_host)
    limits = limits_for(environment, world_size)
    here = [miss for miss in misses if miss.hard_key == environment.hard_key and op in (None, miss.problem.op)]
    sized = [miss for miss in here if miss.problem.world_size == world_size]
    known = _Known.load(environment, world_size, database) if sized else None
    tuned = {miss.problem for miss in sized if known is not None and known.is_tuned(miss.problem)}
    wanted = [miss for miss in sized if miss.problem not in tuned and _can_be_tuned(miss.problem, limits)]
    _make_smaller(path, {(environment.hard_key, problem) for problem in tuned}, skipped)
    _say(wanted, path, str(environment), world_size)
    if others := sorted({miss.problem.world_size for miss in here} - {world_size}):
        note(f"the log also holds problems of world size {', '.join(map(str, others))}: pass --world-size for those")
    found: dict[str, tuple[Problem, ...]] = {}
    for miss in wanted:
        found[miss.problem.op] = (*found.get(miss.problem.op, ()), miss.problem)
    return found


@dataclass(frozen=True, slots=True)
class _Known:
    """What is stored for the sweep's environment and world size."""

    snapshot: Snapshot

    @classmethod
    def load(cls, environment: Environment, world_size: int, database: str | None) -> _Known:
        from tunedcomm.cli._choice import read_layers
        from tunedcomm.db.layers import is_absent, load_snapshot, user_layers

        layers = list(read_layers(None))
        if database is not None:
            layers[:0] = [layer for layer in user_layers(database) if not is_absent(layer)]
        return cls(load_snapshot(environment, world_size, layers=layers))

    def is_tuned(self, problem: Problem) -> bool:
        """True if a sweep came to its end for this problem with the kernels as they are now, or it is pinned."""
        from tunedcomm.dispatch.dispatcher import source_hash_of

        if any(pin.problem == problem for pin in self.snapshot.pins):
            return True
        rows = [row for row in self.snapshot.family_rows(problem) if row.problem == problem]
        challengers = [row for row in rows if not row.is_library]
        if not challengers:
            return any(row.final for row in rows)
        return any(
            row.final and row.source_hash == source_hash_of(problem.op, row.candidate.variant) for row in challengers
        )


def _can_be_tuned(problem: Problem, limits: Limits) -> bool:
    """False for what this version does not know, and for what only the library can run here."""
    from tunedcomm.spec import ops, why_no_kernel

    spec = ops().get(problem.op)
    if spec is None or len(problem.shape) != spec.rank_of_shape or problem.dtype not in spec.dtypes:
        return False
    if problem.layout not in spec.layouts or problem.scaling not in spec.scalings_of(problem.dtype):
        return False
    if problem.reduction not in (spec.reductions or ("",)) or problem.numel == 0:
        return False
    return why_no_kernel(problem, limits, "any") is None


def _environment(on_host: bool) -> Environment:
    """That of this machine, of its first GPU or of the host backend; leaves no GPU context in this process."""
    from tunedcomm.hardware import Environment, detect

    if on_host or num_gpus() < 2:
        return detect(None)
    done = subprocess.run([sys.executable, "-c", _DETECT], capture_output=True, text=True, check=False)
    try:
        return Environment.from_dict(json.loads(done.stdout))
    except ValueError:
        last = done.stderr.strip().rpartition("\n")[2]
        raise TuningError(f"the first GPU cannot be looked at: {last}; run `tunedcomm doctor`") from None


def _make_smaller(path: Path, tuned: Collection[tuple[HardKey, Problem]], skipped: int) -> None:
    """Take out what is tuned by now and what makes no sense; the log is as good without this."""
    from tunedcomm.db import miss_log

    with contextlib.suppress(OSError):
        if tuned or skipped or path.stat().st_size > _LARGE_BYTES:
            miss_log.compact(path, without=tuned)


def _say(wanted: Sequence[Miss], path: Path, environment: str, world_size: int) -> None:
    if not wanted:
        note(f"nothing to do: {path} holds no untuned problem for {world_size} ranks on {environment}")
        return
    note(f"{len(wanted)} untuned problems for {world_size} ranks on {environment} in {path}, most called first:")
    for miss in wanted[:_PRINTED]:
        note(f"  {miss.count:>10} calls  {miss.problem}, served by {miss.source}")
    if len(wanted) > _PRINTED:
        note(f"  and {len(wanted) - _PRINTED} more")
