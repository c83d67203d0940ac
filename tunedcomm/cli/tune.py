"""`tunedcomm tune`: measure candidates on this machine and store what they did."""

from __future__ import annotations

import enum
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunedcomm.cli._fates import broken, fate_lines, fate_to_dict
from tunedcomm.cli._gang import num_gpus, swept_ranks
from tunedcomm.cli._misses import check_alone, missed_problems
from tunedcomm.cli._models import ModelOptions, TokensOption, list_models
from tunedcomm.cli._options import (
    JsonOption,
    SweptKind,
    SweptMode,
    SweptPlace,
    check_dtype,
    check_layout,
    check_reduction,
    check_scaling,
    check_shape,
    known_op,
    known_variant,
    parse_budget,
    parse_gangs,
    split,
)
from tunedcomm.cli._output import emit, emit_json, format_ratio, format_us, note, table
from tunedcomm.cli._problems import kind_of, message_of
from tunedcomm.cli._progress import shown
from tunedcomm.spec import format_shape

if TYPE_CHECKING:
    from tunedcomm.spec import Problem
    from tunedcomm.tuner.search.sweep import ProblemResult, SweepOutcome, SweepSpec

__all__ = ["is_spare_copy", "run_sweep", "tune"]

COLUMNS = ("shape", "bytes", "dtype", "mode", "input", "winner", "p50 us", "library us", "speed-up", "trials", "failed")


# What torchrun and Slurm number the processes of one host by.
LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID")


class Backend(str, enum.Enum):
    """Values of `--backend`."""

    cuda = "cuda"
    host = "host"


def is_spare_copy() -> bool:
    """True for all but the first copy that a launcher started on this host: one command tunes all of its GPUs."""
    return any(value.isdecimal() and int(value) > 0 for name in LOCAL_RANKS if (value := os.environ.get(name, "")))


def tune(
    context: typer.Context,
    *,
    op: Annotated[str | None, typer.Option(help="Op, e.g. all_reduce. May be left out with --from-misses.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="Shapes; by default the op's, 1 KiB to 256 MiB.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Models whose shapes to tune, instead of --shape.")] = None,
    tp: Annotated[
        int | None, typer.Option(min=2, help="Tensor parallelism of --model, the world size; by default all GPUs.")
    ] = None,
    tokens: TokensOption = None,
    models: Annotated[bool, typer.Option("--list-models", help="Print what --model may name, and end.")] = False,
    from_misses: Annotated[
        bool, typer.Option("--from-misses", help="Tune what was called here without having been tuned.")
    ] = False,
    dtype: Annotated[list[str] | None, typer.Option(help="Dtypes. By default the models', else bfloat16.")] = None,
    mode: Annotated[
        SweptMode | None,
        typer.Option(help="Inside CUDA graphs, outside, or both. By default graph, eager on the host."),
    ] = None,
    world_size: Annotated[int | None, typer.Option(min=2, help="Ranks; by default all GPUs.")] = None,
    backend: Annotated[
        Backend | None, typer.Option(help="By default cuda where there are two GPUs or more, else host.")
    ] = None,
    reduction: Annotated[list[str] | None, typer.Option(help="Reductions. By default the op's first.")] = None,
    layout: Annotated[list[str] | None, typer.Option(help="Layouts (docs/ops.md). By default the op's first.")] = None,
    scaling: Annotated[list[str] | None, typer.Option(help="Scalings (docs/ops.md). Fp8: by default rowwise.")] = None,
    input_kind: Annotated[SweptKind, typer.Option(help="Whether peers can address the input.")] = SweptKind.plain,
    in_place: Annotated[SweptPlace, typer.Option(help="Whether the result overwrites the input.")] = SweptPlace.no,
    variants: Annotated[list[str] | None, typer.Option(help="Only these variants, besides `library`.")] = None,
    budget: Annotated[str | None, typer.Option(help="Time for the whole sweep, e.g. 90s, 10m, 1h30m.")] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Most candidates a problem.")] = None,
    gangs: Annotated[
        str,
        typer.Option(
            help="Groups of ranks that measure side by side, each on GPUs of its own; auto fills the machine."
        ),
    ] = "auto",
    seed: Annotated[int, typer.Option(min=-(2**63), max=2**63 - 1, help="Seed of the search and of the inputs.")] = 0,
    db: Annotated[str | None, typer.Option(help="Database to write; by default the user database.")] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Try again what failed in an earlier sweep.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest kernel for every problem of a sweep and store it.

    Options with several values may be repeated or take them separated by commas. Every trial is stored as it ends: stop
    the command at any time, the same command goes on. Exit code 1 if a problem ended without a candidate that runs, or
    if a variant named by --variants failed wherever it was tried.

    With --json, stdout holds one object, the summary, and stderr one object a line: {"event": "note", "text": ...},
    {"event": "progress", ...} about once a second, and {"event": "end", ...} at last. The latter two have elapsed_s,
    seconds_left (null while unknown), problems, problems_done, trials, trials_planned, trials_per_minute, failures by
    status, num_gangs started, num_compiled and bind_share (trials that had to wait for the compiler, and the share of
    the gangs' time in binding after 30 s), and gangs: slot, step, problem, candidate, final, best_us, library_us.

    Example: tunedcomm tune --op all_reduce --dtype bfloat16,float16 --mode both --budget 10m

    Example: tunedcomm tune --op all_reduce --world-size 2 --gangs auto --json

    Example: tunedcomm tune --op all_reduce --model llama3-70b,qwen3-32b --tp 4 --tokens 1,8,64,4096

    Example: tunedcomm tune --from-misses --budget 30m
    """
    if models:
        list_models(as_json=as_json)
        return
    if is_spare_copy():
        note("another copy of this command tunes this host's GPUs; this one has nothing to do (start one a host)")
        return
    on_host = backend is Backend.host
    named = ModelOptions.of(model, tp=tp, tokens=tokens, shape=shape)
    ranks = swept_ranks(named.ranks(world_size), None if backend is None else backend.value)
    missed: dict[str, tuple[Problem, ...]] = {}
    if from_misses:
        check_alone(context)
        only = None if op is None else known_op(op).name
        missed = missed_problems(only, world_size=ranks, on_host=on_host, database=db)
        if not missed:
            if as_json:
                emit_json([])
            return
        op = next(iter(missed))
    if op is None:
        raise typer.BadParameter("it is missing; pass e.g. --op all_reduce", param_hint="--op")
    spec = known_op(op)
    from tunedcomm.tuner.search.sweep import SweepSpec

    wanted = SweepSpec(
        op=spec.name,
        shapes=named.shapes(spec.name, ranks) or tuple(check_shape(text, spec) for text in split(shape)),
        dtypes=(dtypes := tuple(check_dtype(name, spec) for name in split(dtype) or named.dtypes or ["bfloat16"])),
        modes=() if mode is None else mode.values,
        world_size=ranks,
        backend=None if backend is None else ("host" if on_host else "cuda"),
        reductions=tuple(check_reduction(name, spec) for name in split(reduction)) or (check_reduction(None, spec),),
        layouts=tuple(check_layout(name, spec) for name in split(layout)),
        scalings=tuple(check_scaling(name, spec, one) for one in dtypes for name in split(scaling)),
        input_kinds=input_kind.values,
        in_place=in_place.values,
        variants=tuple(known_variant(spec.name, name) for name in split(variants)),
        trials=trials,
        budget_s=None if budget is None else parse_budget(budget),
        gangs=parse_gangs(gangs),
        seed=seed,
        retry=retry,
        command=shlex.join(["tunedcomm", *sys.argv[1:]]),
    )
    if missed:
        tune_missed(wanted, missed, db, as_json=as_json)
    else:
        tune_wanted(wanted, db, as_json=as_json)


def tune_wanted(spec: SweepSpec, database: str | None, *, as_json: bool) -> None:
    """One sweep and its summary."""
    outcome, url = run_sweep(spec, database, as_json=as_json)
    report(outcome, url, as_json=as_json)
    leave([outcome], spec.variants, database, as_json=as_json)


def tune_missed(
    spec: SweepSpec, missed: Mapping[str, tuple[Problem, ...]], database: str | None, *, as_json: bool
) -> None:
    """One sweep an op, like `spec` but of these problems; with a budget each has an equal share of it."""
    budget_s = None if spec.budget_s is None else spec.budget_s / len(missed)
    done = []
    for op, problems in missed.items():
        mine = replace(spec, op=op, problems=problems, budget_s=budget_s)
        done.append(run_sweep(mine, database, as_json=as_json))
        if not as_json:
            report(*done[-1], as_json=False)
    if as_json:
        emit_json([_to_dict(outcome, url) for outcome, url in done])
    leave([outcome for outcome, _ in done], spec.variants, database, as_json=as_json)


def leave(outcomes: Sequence[SweepOutcome], named: Sequence[str], database: str | None, *, as_json: bool) -> None:
    """Say what failed; exit with code 1 if a problem has no candidate that runs, or a named variant runs nowhere."""
    for outcome in outcomes:
        for line in fate_lines(outcome, named, database):
            say(line, as_json=as_json)
    unsolved = [problem for outcome in outcomes for problem in outcome.unsolved]
    if unsolved:
        say("no candidate runs: " + "; ".join(map(str, unsolved)), as_json=as_json)
    if unsolved or any(broken(outcome, named) for outcome in outcomes):
        raise typer.Exit(1)


def say(text: str, *, as_json: bool) -> None:
    """A line on stderr, with --json an event."""
    note(json.dumps({"event": "note", "text": text}) if as_json else text)


def run_sweep(spec: SweepSpec, database: str | None, *, as_json: bool = False) -> tuple[SweepOutcome, str]:
    """Run a sweep with its progress on stderr; returns its outcome and where it was stored.

    Raises:
        BadParameter: the op has no such problems.
        DatabaseError: the database cannot be made or written.
        TuningError: the sweep could not be started or carried on.
    """
    from tunedcomm.db.layers import writable_database
    from tunedcomm.db.store import Database
    from tunedcomm.settings import db_patience_s
    from tunedcomm.tuner.plan import resolve
    from tunedcomm.tuner.search.sweep import sweep

    if spec.backend is None and num_gpus() < 2:
        say("fewer than 2 GPUs here: tuning the host backend, whose timings say nothing about GPUs", as_json=as_json)
        spec = replace(spec, backend="host")
    try:
        resolve(spec)  # before a database is made
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with Database.open(writable_database(database), create=True, patience_s=db_patience_s()) as opened:
        url = str(opened.path or opened.url)
        say(f"tuning {spec.op}, storing in {url}", as_json=as_json)
        try:
            with shown(as_json=as_json) as progress:
                return sweep(spec, opened, progress), url
        except KeyboardInterrupt:
            say("stopped; what was measured is stored, and the same command goes on from there", as_json=as_json)
            raise typer.Exit(1) from None


def report(outcome: SweepOutcome, url: str, *, as_json: bool) -> None:
    """Print the summary on stdout."""
    if as_json:
        emit_json(_to_dict(outcome, url))
        return
    where = "" if outcome.environment is None else f" on {outcome.environment}"
    ranks = outcome.problems[0].problem.world_size if outcome.problems else 0
    table(COLUMNS, [_cells(result) for result in outcome.problems], title=f"{ranks} ranks{where}")
    end = "out of time" if outcome.reason == "budget" else "done"
    emit(f"{end}: {outcome.num_trials} trials in {outcome.seconds:.0f} s, stored in {url} (run {outcome.run_id})")
    if outcome.compiled_ahead or outcome.num_compiled:
        waited = "" if outcome.compile_share is None else f", {outcome.compile_share:.1%} of the time"
        share = "" if outcome.bind_share is None else f"; {outcome.bind_share:.1%} of it went into binding in all"
        emit(f"{outcome.num_compiled} trials had to wait for the compiler{waited}{share}")
    if outcome.dropped:
        note(f"left alone after they had cost several gangs: {', '.join(outcome.dropped)}")


def _cells(result: ProblemResult) -> list[str]:
    problem, best = result.problem, result.best
    failed = ", ".join(f"{count} {status}" for status, count in sorted(result.failures.items()))
    return [
        format_shape(problem.shape),
        message_of(problem),
        problem.dtype,
        problem.mode,
        kind_of(problem),
        "(none runs)" if best is None else str(best.candidate),
        format_us(None if best is None else best.latency_p50_us),
        format_us(result.library_us),
        format_ratio(result.library_us, None if best is None else best.latency_p50_us),
        str(result.num_trials),
        failed or "-",
    ]


def _to_dict(outcome: SweepOutcome, url: str) -> dict[str, Any]:
    environment = outcome.environment
    return {
        "database": url,
        "run_id": outcome.run_id,
        "reason": outcome.reason,
        "environment": None if environment is None else {"digest": environment.digest, **environment.to_dict()},
        "num_trials": outcome.num_trials,
        "failures": outcome.failures,
        "dropped": list(outcome.dropped),
        "num_skipped": outcome.num_skipped,
        "variants": [fate_to_dict(fate) for fate in outcome.fates],
        "num_gangs": outcome.num_gangs,
        "start_s": outcome.start_s,
        "num_compiled": outcome.num_compiled,
        "bind_share": outcome.bind_share,
        "compile_share": outcome.compile_share,
        "seconds": outcome.seconds,
        "problems": [
            {
                "problem": result.problem.to_dict(),
                "variant": None if result.best is None else result.best.variant,
                "config": None if result.best is None else result.best.config,
                "latency_p50_us": None if result.best is None else result.best.latency_p50_us,
                "library_us": result.library_us,
                "speedup": result.speedup,
                "num_trials": result.num_trials,
                "failures": result.failures,
            }
            for result in outcome.problems
        ],
    }
