"""Verbs that measure on this machine and store the results: `tunedcomm tune` and `tunedcomm db verify`."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunedcomm import settings
from tunedcomm.cli.options import (
    Backend,
    BackendOption,
    GangsOption,
    JsonOption,
    ProblemOptions,
    SweepOptions,
    SweptMode,
    SweptPlace,
    WrittenOption,
    backend_or_default,
    bad_usage,
    changed_options,
    check_dtype,
    check_option,
    kinds_of,
    known_op,
    known_variant,
    local_ranks,
    modes_of,
    parse_budget,
    parse_gangs,
    parse_share,
    split,
    takes,
)
from tunedcomm.cli.output import (
    attributes,
    counted,
    emit,
    emit_json,
    format_ratio,
    kind_of,
    message_of,
    named_candidate,
    note,
    table_of,
)
from tunedcomm.cli.progress import say, shown
from tunedcomm.cli.stored import open_to_write, read_layers
from tunedcomm.errors import DatabaseAccessError
from tunedcomm.metrics import format_us
from tunedcomm.spec import Problem, admits, format_shape, variants
from tunedcomm.tuner.models import Model, catalog

if TYPE_CHECKING:
    from tunedcomm.hardware import Environment
    from tunedcomm.spec import Limits
    from tunedcomm.tuner.search.sweep import ProblemResult, SweepOutcome, SweepSpec
    from tunedcomm.tuner.verify import Verified, VerifyOutcome

_COLUMNS: dict[str, Callable[[ProblemResult], object]] = {
    "shape": lambda result: format_shape(result.problem.shape),
    "bytes": lambda result: message_of(result.problem),
    "dtype": lambda result: result.problem.dtype,
    "mode": lambda result: result.problem.mode,
    "input": lambda result: kind_of(result.problem),
    "winner": lambda result: "(none runs)" if result.best is None else result.best.candidate,
    "p50 us": lambda result: format_us(_best_us(result)),
    "library us": lambda result: format_us(result.library_us),
    "speed-up": lambda result: format_ratio(result.library_us, _best_us(result)),
    "trials": lambda result: result.num_trials,
    "failed": lambda result: counted(dict(sorted(result.failures.items()))) or "-",
}

# What torchrun and Slurm number the processes of one host by.
LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID")


def is_spare_copy() -> bool:
    """True, with a note, for all but the first copy that a launcher started: one command uses all GPUs of a host."""
    spare = any(value.isdecimal() and int(value) > 0 for name in LOCAL_RANKS if (value := os.environ.get(name, "")))
    if spare:
        note("another copy of this command uses this host's GPUs; this one has nothing to do (start one a host)")
    return spare


@takes(SweepOptions)
def tune(
    options: SweepOptions,
    *,
    context: typer.Context,
    models: Annotated[bool, typer.Option("--list-models", help="Print the models and end.")] = False,
    from_misses: Annotated[bool, typer.Option("--from-misses", help="What programs called untuned.")] = False,
    backend: BackendOption = None,
    reduction: Annotated[list[str] | None, typer.Option(help="By default the op's first.")] = None,
    layout: Annotated[list[str] | None, typer.Option(help="By default the op's first (docs/ops.md).")] = None,
    scaling: Annotated[list[str] | None, typer.Option(help="Of fp8; by default rowwise (docs/ops.md).")] = None,
    in_place: Annotated[SweptPlace, typer.Option(help="Results overwrite inputs.")] = "no",
    variants: Annotated[list[str] | None, typer.Option(help="Only these variants, besides `library`.")] = None,
    budget: Annotated[str | None, typer.Option(help="For the whole sweep, e.g. 90s, 10m, 1h30m.")] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Most candidates per problem.")] = None,
    gangs: GangsOption = "auto",
    seed: Annotated[int, typer.Option(min=-(2**63), max=2**63 - 1, help="Seed of the search and of the inputs.")] = 0,
    db: WrittenOption = None,
    retry: Annotated[bool, typer.Option("--retry", help="Try again what failed in an earlier sweep.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Find and store the fastest kernel for each problem of a sweep. The same command resumes it.

    Lists are separated by commas, or the option is repeated.

    Example: tunedcomm tune --op all_reduce --dtype bfloat16,float16

    Example: tunedcomm tune --op gemm_rs --model llama3-70b --tp 4 --tokens 1,64

    Example: tunedcomm tune --from-misses --budget 30m
    """
    if models:
        if as_json:
            emit_json(list(catalog().values()))
        else:
            table_of(_MODEL_COLUMNS, catalog().values())
        return
    if is_spare_copy():
        return
    ranks = options.ranks(backend)
    op, missed = options.op, dict[str, tuple[Problem, ...]]()
    if from_misses:
        _check_alone(context)
        only = None if op is None else known_op(op).name
        missed = _missed_problems(only, world_size=ranks, backend=backend_or_default(backend), database=db)
        if not missed:
            if as_json:
                emit_json([])
            return
        op = next(iter(missed))
    if op is None:
        raise bad_usage("--op", "it is missing; pass e.g. --op all_reduce")
    spec = known_op(op)
    from tunedcomm.tuner.search.sweep import SweepSpec

    dtypes = options.dtypes(spec)
    wanted = SweepSpec(
        op=spec.name,
        shapes=options.shapes(spec, ranks),
        dtypes=dtypes,
        modes=() if options.mode is None else modes_of(options.mode),
        world_size=ranks,
        backend=backend,
        reductions=tuple(check_option("reduction", name, spec) for name in split(reduction) or (None,)),
        layouts=tuple(check_option("layout", name, spec) for name in split(layout)),
        scalings=tuple(check_option("scaling", name, spec, dtype) for dtype in dtypes for name in split(scaling))
        or options.scalings(spec),
        input_kinds=kinds_of(options.input_kind),
        in_place={"no": (False,), "yes": (True,), "both": (False, True)}[in_place],
        variants=tuple(known_variant(spec.name, name) for name in split(variants)),
        trials=trials,
        budget_s=None if budget is None else parse_budget(budget),
        gangs=parse_gangs(gangs),
        seed=seed,
        retry=retry,
        command=shlex.join(["tunedcomm", *sys.argv[1:]]),
    )
    sweeps = [wanted]
    if missed:  # one an op; each has an equal share of the budget
        share_s = None if wanted.budget_s is None else wanted.budget_s / len(missed)
        sweeps = [replace(wanted, op=op, problems=problems, budget_s=share_s) for op, problems in missed.items()]
    done = []
    for sweep in sweeps:
        done.append(run_sweep(sweep, db, as_json=as_json))
        if not as_json:
            report(*done[-1])
    if as_json:
        summaries = [_to_dict(*one) for one in done]
        emit_json(summaries if missed else summaries[0])
    _report_failures([outcome for outcome, _ in done], wanted.variants, db, as_json=as_json)


def _report_failures(
    outcomes: Sequence[SweepOutcome], named: Sequence[str], database: str | None, *, as_json: bool
) -> None:
    """Say what failed; exit with code 1 if a problem has no candidate or baseline, or a named variant runs nowhere.

    Told are variants that were `named`, and others of which nothing runs.
    """
    lines: list[str] = []
    for outcome in outcomes:
        if count := outcome.num_skipped:
            whose = "1 candidate failed in an earlier sweep and is"
            whose = whose if count == 1 else f"{count} candidates failed in an earlier sweep and are"
            lines.append(
                f"{whose} not tried again: after mending a kernel raise its variant's `version`, or pass --retry"
            )
        for summary in outcome.variants:
            name, is_named = summary.variant, summary.variant in named
            if is_named and summary.infeasible:
                lines.append(f"{name} is infeasible for every problem of this sweep: {summary.infeasible}")
            if summary.is_broken:
                lines.append(f"{name}: none of {summary.num_failed} that were tried works")
            if summary.is_broken or (is_named and summary.failures):
                for first in summary.firsts:
                    count = summary.failures[first.status]
                    lines.append(f"{name}: {count} {first.status}, the first {first.candidate}: {first.reason}")
                lines.append(f"{name}: all trials: {show_command(summary.firsts[0].problem, database)}")
            variant = variants(outcome.problems[0].problem.op).get(name) if outcome.problems else None
            if variant is None or not is_named or not summary.num_ran:
                continue
            if not variant.bounded:
                why = "when it is forced: it would wait for a lost peer for ever"
                lines.append(f"{name} was measured, and runs only {why}")
            elif not admits("default", variant.numerics):
                why = f"of ops that take it, or if forced: its class is {variant.numerics}"
                lines.append(f'{name} was measured, and runs only in calls with numerics="any", {why}')
    unsolved = [problem for outcome in outcomes for problem in outcome.unsolved]
    if unsolved:
        lines.append("no candidate runs: " + "; ".join(map(str, unsolved)))
    without = [r.library_failure for o in outcomes for r in o.problems if r.library_failure is not None]
    for trial in without:
        lines.append(
            f"no baseline at {trial.problem}: the library {trial.status}: {trial.reason}; run the command again"
        )
    for line in lines:
        say(line, as_json=as_json)
    if (
        unsolved
        or without
        or any(summary.is_broken and summary.variant in named for outcome in outcomes for summary in outcome.variants)
    ):
        raise typer.Exit(1)


def run_sweep(
    spec: SweepSpec, database: str | None, *, as_json: bool = False, is_quiet: bool = False
) -> tuple[SweepOutcome, str]:
    """Run a sweep with its progress on stderr, `is_quiet` only on a terminal; returns its outcome and its database."""
    from tunedcomm.tuner.search.sweep import resolve, sweep

    if spec.backend is None and backend_or_default() == "host":
        say("fewer than 2 GPUs here: tuning the host backend, whose timings say nothing about GPUs", as_json=as_json)
        spec = replace(spec, backend="host")
    try:
        resolve(spec)  # before a database is made
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with open_to_write(database, create=True, patience_s=settings.db_patience_s()) as (opened, url):
        say(f"tuning {spec.op}, storing in {url}", as_json=as_json)
        stopped = "; what was measured is stored, and the same command goes on from there"
        with shown(stopped, as_json=as_json, is_quiet=is_quiet) as progress:
            return sweep(spec, opened, progress), url


def report(outcome: SweepOutcome, url: str) -> None:
    """Print the summary on stdout."""
    where = "" if outcome.environment is None else f" on {outcome.environment}"
    ranks = outcome.problems[0].problem.world_size if outcome.problems else 0
    table_of(_COLUMNS, outcome.problems, title=f"{ranks} ranks{where}")
    done = outcome.progress
    end = "out of time" if outcome.reason == "budget" else "done" if done.trials else "nothing left to measure"
    emit(f"{end}: {done.trials} trials in {done.elapsed_s:.0f} s, stored in {url} (run {outcome.run_id})")
    if outcome.compiled_ahead or done.num_compiled:
        waited = "" if outcome.compile_share is None else f", {outcome.compile_share:.1%} of the time"
        share = "" if done.bind_share is None else f"; {done.bind_share:.1%} of it went into binding in all"
        emit(f"{done.num_compiled} trials had to wait for the compiler{waited}{share}")
    if outcome.dropped:
        note(f"not tried any more, because they cost several gangs: {', '.join(outcome.dropped)}")


def _best_us(result: ProblemResult) -> float | None:
    return None if result.best is None else result.best.latency_p50_us


def _to_dict(outcome: SweepOutcome, url: str) -> dict[str, Any]:
    """As JSON has it."""
    done = outcome.progress
    summaries, problems = [], []
    for summary in outcome.variants:
        reasons = {first.status: first.reason for first in summary.firsts}
        summaries.append({**attributes(summary, "variant num_ran failures infeasible"), "reasons": reasons})
    for result in outcome.problems:
        best = {"variant": None, "config": None, "latency_p50_us": None}
        if result.best is not None:
            best = attributes(result.best, "variant config latency_p50_us")
        problems.append({**attributes(result, "problem library_us speedup num_trials failures"), **best})
    return {
        "database": url,
        **attributes(outcome, "run_id reason environment dropped num_skipped start_s compile_share"),
        **attributes(done, "failures num_gangs num_compiled bind_share"),
        "num_trials": done.trials,
        "seconds": done.elapsed_s,
        "variants": summaries,
        "problems": problems,
    }


def show_command(problem: Problem, database: str | None) -> str:
    """The command that prints every trial of a problem."""
    shape, ranks, mode = format_shape(problem.shape), problem.world_size, problem.mode
    usual = ProblemOptions(op=problem.op, shape=shape, world_size=ranks, dtype=problem.dtype, mode=mode).problem()
    words = ["tunedcomm", "db", "show", "--op", problem.op, "--shape", shape, "--world-size", str(ranks)]
    words += ["--dtype", problem.dtype, "--mode", mode, *changed_options(usual, problem)]
    return shlex.join([*words, *(["--db", database] if database else [])])


_MODEL_COLUMNS: dict[str, Callable[[Model], object]] = {
    "model": lambda model: model.name,
    "also": lambda model: ", ".join(model.aliases) or "-",
    "layers": lambda model: model.num_layers,
    "hidden": lambda model: model.hidden_size,
    "intermediate": lambda model: "-" if model.intermediate_size is None else model.intermediate_size,
    "expert": lambda model: "-" if model.experts is None else model.experts.intermediate_size,
    "experts": lambda model: "-" if model.experts is None else model.experts.num_experts,
    "heads": lambda model: model.num_heads,
    "kv heads": lambda model: "latent" if model.latent is not None else model.num_kv_heads,
    "head dim": lambda model: model.head_dim,
    "vocabulary": lambda model: model.vocab_size,
    "dtype": lambda model: model.dtype,
    "published": lambda model: model.source.published,
}


# Options that say which problems to tune, as the log does.
_ABOUT_PROBLEMS = "shape model tp tokens dtype mode reduction input_kind in_place layout scaling".split()
_PRINTED = 20
# A log of this size is made smaller when it is read.
_LARGE_BYTES = 64 << 10


def _check_alone(context: typer.Context) -> None:
    """Refuse options that name problems beside `--from-misses`."""
    for name in _ABOUT_PROBLEMS:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise bad_usage(
                "--from-misses",
                f"the log says which problems to tune, so --{name.replace('_', '-')} has no place beside it; run the "
                "two sweeps one after the other",
            )
    if settings.miss_log() is False:
        raise bad_usage("--from-misses", "TUNEDCOMM_MISS_LOG switches the log off; unset it, or name the file to read")


def _missed_problems(
    op: str | None, *, world_size: int, backend: Backend, database: str | None
) -> dict[str, tuple[Problem, ...]]:
    """Op to its problems in the log that are still not tuned here, most called first; says on stderr what was taken."""
    from tunedcomm import kernels
    from tunedcomm.db import misses as miss_log
    from tunedcomm.symm.layout import limits_for
    from tunedcomm.tuner.search.sweep import environment_of

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
    environment = environment_of(backend)
    limits = limits_for(environment, world_size)
    here = [miss for miss in misses if miss.hard_key == environment.hard_key and op in (None, miss.problem.op)]
    sized = [miss for miss in here if miss.problem.world_size == world_size]
    tuned = _tuned({miss.problem for miss in sized}, environment, world_size, database)
    wanted = [miss for miss in sized if miss.problem not in tuned and _can_be_tuned(miss.problem, limits)]
    with contextlib.suppress(OSError):  # the log is as good without this
        if tuned or skipped or path.stat().st_size > _LARGE_BYTES:
            miss_log.compact(path, without={(environment.hard_key, problem) for problem in tuned})
    where = f"for {world_size} ranks on {environment}"
    if wanted:
        note(f"{len(wanted)} untuned problems {where} in {path}, most called first:")
    else:
        note(f"nothing to do: {path} holds no untuned problem {where}")
    for miss in wanted[:_PRINTED]:
        note(f"  {miss.count:>10} calls  {miss.problem}, served by {miss.source}")
    if len(wanted) > _PRINTED:
        note(f"  and {len(wanted) - _PRINTED} more")
    if others := sorted({miss.problem.world_size for miss in here} - {world_size}):
        note(f"the log also holds problems of world size {', '.join(map(str, others))}: pass --world-size for those")
    found: dict[str, tuple[Problem, ...]] = {}
    for miss in wanted:
        found[miss.problem.op] = (*found.get(miss.problem.op, ()), miss.problem)
    return found


def _tuned(problems: set[Problem], environment: Environment, world_size: int, database: str | None) -> set[Problem]:
    """Those problems that are pinned, or whose sweep came to its end with the kernels as they are now."""
    from tunedcomm.db.layers import is_absent, load_snapshot, named_layers
    from tunedcomm.dispatch.dispatcher import source_hash_of

    if not problems:
        return set()
    named = [] if database is None else [layer for layer in named_layers(database) if not is_absent(layer)]
    snapshot = load_snapshot(environment, world_size, layers=[*named, *read_layers(None)])
    found = problems & {pin.problem for pin in snapshot.pins}
    for problem in problems - found:
        rows = [row for row in snapshot.family_rows(problem) if row.problem == problem]
        challengers = [row for row in rows if not row.is_library] or rows
        if any(
            row.final and (row.is_library or row.source_hash == source_hash_of(problem.op, row.candidate.variant))
            for row in challengers
        ):
            found.add(problem)
    return found


def _can_be_tuned(problem: Problem, limits: Limits) -> bool:
    """False for what this version does not know, and for what only the library can run here."""
    from tunedcomm.spec import why_no_kernel
    from tunedcomm.tuner.search.sweep import check_problem

    try:
        check_problem(problem)
    except ValueError:
        return False
    return problem.numel > 0 and why_no_kernel(problem, limits, "any") is None


_VERIFIED_COLUMNS: dict[str, Callable[[Verified], object]] = {
    "shape": lambda result: format_shape(result.winner.problem.shape),
    "bytes": lambda result: message_of(result.winner.problem),
    "dtype": lambda result: result.winner.problem.dtype,
    "mode": lambda result: f"{result.winner.problem.mode}, {kind_of(result.winner.problem)}",
    "winner": lambda result: f"{result.winner.candidate}{_if_asked(result.winner.policies)}",
    "then us": lambda result: format_us(result.winner.row.latency_p50_us),
    "speed-up": lambda result: format_ratio(result.winner.library_us, result.winner.latency_us),
    "now us": lambda result: format_us(result.latency_us),
    "library us": lambda result: format_us(result.library_us),
    "now": lambda result: format_ratio(result.library_us, result.latency_us),
    "verdict": lambda result: result.verdict,
}


def db_verify(
    *,
    op: Annotated[list[str] | None, typer.Option(help="Only these ops.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Only these dtypes.")] = None,
    mode: Annotated[SweptMode, typer.Option(help="Inside CUDA graphs, outside, or both.")] = "both",
    limit: Annotated[int | None, typer.Option(min=1, help="Most problems, those of other software first.")] = None,
    tolerance: Annotated[str, typer.Option(help="How much longer a winner may take, besides the noise.")] = "10%",
    world_size: Annotated[int | None, typer.Option(min=2, help="Ranks; by default all GPUs.")] = None,
    backend: BackendOption = None,
    gangs: GangsOption = "auto",
    db: Annotated[
        str | None, typer.Option(help="Database to verify and to write; by default every layer, and the user database.")
    ] = None,
    no_store: Annotated[bool, typer.Option("--no-store", help="Do not store the new timings.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Time this machine's stored winners again beside the library. Names those that do not hold any more.

    Winners, runners-up and the library are checked as `tunedcomm tune` checks them, then timed as in its finals. The
    new timings are stored and dispatch uses them: after a new driver or a new torch this is all that is needed.

    Exit code 1 if a winner fails, cannot be measured, is slower than the library, or became slower by more than
    --tolerance, both in µs and relative to the library; or if nothing is stored for this machine. Progress on stderr is
    that of `tunedcomm tune`.

    Example: tunedcomm db verify --tolerance 5% --no-store
    """
    if is_spare_copy():
        return
    from tunedcomm.db.layers import named_layers
    from tunedcomm.tuner.verify import VerifySpec, verify

    spec = VerifySpec(
        ops=tuple(known_op(name).name for name in split(op)),
        dtypes=tuple(check_dtype(name) for name in split(dtype)),
        modes=modes_of(mode),
        limit=limit,
        tolerance=parse_share(tolerance),
        layers=None if db is None else tuple(named_layers(db)),
        world_size=local_ranks(world_size, backend),
        backend=backend_or_default(backend),
        gangs=parse_gangs(gangs),
        command=shlex.join(["tunedcomm", *sys.argv[1:]]),
    )
    patience_s = settings.db_patience_s()
    target = nullcontext((None, None)) if no_store else open_to_write(db, create=db is None, patience_s=patience_s)
    with target as (opened, url):
        if spec.backend == "host":
            say("verifying the host backend, whose timings say nothing about GPUs", as_json=as_json)
        say("timing the stored winners again" + ("" if url is None else f", storing in {url}"), as_json=as_json)
        with shown("" if url is None else "; what was measured is stored", as_json=as_json) as progress:
            outcome = verify(spec, opened, progress)
    if as_json:
        emit_json(_verified_to_dict(outcome, url))
    else:
        _report_verified(outcome, url)
    if outcome.wrong or not outcome.results:
        raise typer.Exit(1)


def _report_verified(outcome: VerifyOutcome, url: str | None) -> None:
    here = outcome.environment
    where = f"{outcome.world_size} ranks" + ("" if here is None else f" on {here}")
    if not outcome.results:
        emit(f"no winner is stored for {where}; `tunedcomm tune` finds some, `tunedcomm db list` prints what there is")
        return
    table_of(_VERIFIED_COLUMNS, outcome.results, title=where)
    if here is not None:
        changes = sorted({change for result in outcome.results for change in here.drift(result.winner.row.environment)})
        if changes:
            emit(f"since they were measured: {', '.join(changes)}")
    for result in outcome.results:
        if result.verdict != "ok":
            emit(f"{result.verdict}: {result.winner.problem}: {result.winner.candidate}: {result.why}")
        if result.faster is not None:
            now = f"{format_us(result.faster.score)} µs against {format_us(result.latency_us)} µs"
            emit(f"overtaken: {result.winner.problem}: {result.faster.candidate} is faster now, {now}")
    stored = "nothing was stored" if url is None else f"stored in {url} (run {outcome.run_id})"
    emit(
        f"{len(outcome.wrong)} of {len(outcome.results)} winners do not hold any more; {outcome.num_trials} trials in "
        f"{outcome.seconds:.0f} s, {stored}"
    )


def _if_asked(policies: Sequence[str]) -> str:
    return "" if "default" in policies else f" [numerics={policies[0]}]"


def _verified_to_dict(outcome: VerifyOutcome, url: str | None) -> dict[str, Any]:
    """As JSON has it."""
    from tunedcomm.selection.score import noise
    from tunedcomm.tuner.verify import uncertainty

    here = outcome.environment
    winners = []
    for result in outcome.results:
        then = result.winner
        winners.append(
            {
                "problem": then.problem,
                **named_candidate(then.candidate),
                "policies": then.policies,
                "layer": then.row.layer,
                **attributes(result, "verdict why"),
                "stored": {
                    **attributes(then, "latency_us library_us"),
                    "noise": noise(then.row),
                    "measured_us": then.row.latency_p50_us,
                    "uncertainty": uncertainty(then.row),
                    "created_at": then.row.created_at,
                    "environment": then.row.environment.digest,
                    "changes": [] if here is None else here.drift(then.row.environment),
                },
                "measured": attributes(result, "latency_us library_us noise"),
                "faster": None if result.faster is None else result.faster.candidate,
                "faster_us": None if result.faster is None else result.faster.score,
            }
        )
    names = "run_id environment world_size num_trials num_gangs seconds"
    return {"database": url, **attributes(outcome, names), "num_wrong": len(outcome.wrong), "winners": winners}
