"""Verbs that measure on this machine and store the results: `tunedcomm tune` and `tunedcomm db verify`."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunedcomm import settings
from tunedcomm.cli.models import Model, catalog
from tunedcomm.cli.options import (
    NO_GRAPHS,
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
    check_seed,
    complete_op,
    complete_variant,
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
    Table,
    attributes,
    counted,
    format_ratio,
    kind_of,
    named_candidate,
    note,
    problem_columns,
    show,
)
from tunedcomm.cli.progress import duration, say, shown
from tunedcomm.cli.stored import open_to_write, read_each, with_every_layer
from tunedcomm.errors import DatabaseAccessError, TuningError
from tunedcomm.metrics import format_us, plural
from tunedcomm.spec import Problem, admits, format_shape, variants

if TYPE_CHECKING:
    from tunedcomm.db.store import Database
    from tunedcomm.hardware import Environment
    from tunedcomm.spec import Limits
    from tunedcomm.tuner.search.spec import SweepSpec
    from tunedcomm.tuner.search.summary import ProblemResult, SweepOutcome, VariantSummary
    from tunedcomm.tuner.verify import Verified, VerifyOutcome

# Starts of ranks that check what is borrowed: a candidate that hangs or crashes ends one.
_MOST_STARTS = 8
_COLUMNS: dict[str, Callable[[ProblemResult], object]] = {
    **problem_columns("shape bytes dtype mode input", attrgetter("problem")),
    "winner": lambda result: (
        result.best.candidate if result.best is not None else "(none runs)" if result.reached else "(not reached)"
    ),
    "p50 µs": lambda result: format_us(result.best_us),
    "library µs": lambda result: format_us(result.best_library_us) + (" in place" if _is_in_place(result) else ""),
    "speed-up": lambda result: format_ratio(result.best_library_us, result.best_us),
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
    variants: Annotated[
        list[str] | None,
        typer.Option(help="Only these variants, besides `library`.", autocompletion=complete_variant),
    ] = None,
    budget: Annotated[str | None, typer.Option(help="For the whole sweep, e.g. 90s, 10m, 1h30m.")] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Most candidates per problem.")] = None,
    gangs: GangsOption = "auto",
    seed: Annotated[int, typer.Option(callback=check_seed, help="Seed of search and inputs.")] = 0,
    db: WrittenOption = None,
    retry: Annotated[bool, typer.Option("--retry", help="Try again what failed in an earlier sweep.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be tried, and the time.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Find and store the fastest kernel of each problem. The same command resumes it. Lists: a,b or repeated options.

    Example: tunedcomm tune --op all_reduce --dtype bfloat16,float16

    Example: tunedcomm tune --op gemm_rs --model llama3-70b --tp 4 --tokens 1,64

    Example: tunedcomm tune --from-misses --budget 30m
    """
    if models:
        title = "sizes, as in the publishers' config.json (MLA: latent attention)"
        table = replace(Table.of(_MODEL_COLUMNS, catalog().values(), title), is_keyed=True)
        show(list(catalog().values()), [table], as_json=as_json)
        return
    if is_spare_copy():
        return
    ranks = options.ranks(backend)
    op, missed = options.op, list[Problem]()
    if from_misses:
        _check_alone(context)
        only = None if op is None else known_op(op).name
        missed = _missed_problems(only, world_size=ranks, backend=backend_or_default(backend), database=db)
        if not missed:
            show([], [], as_json=as_json)
            return
        op = missed[0].op
    if op is None:
        raise bad_usage("--op", "it is missing; pass e.g. --op all_reduce")
    spec = known_op(op)
    from tunedcomm.tuner.machine import machine_settings
    from tunedcomm.tuner.search.spec import SweepSpec, problems_of

    usual = machine_settings(backend_or_default(backend), ranks, parse_gangs(gangs))
    if backend is None and usual.backend == "host":
        say("fewer than 2 GPUs here: tuning the host backend, whose timings say nothing about GPUs", as_json=as_json)
    if usual.backend == "host" and options.mode in ("graph", "both"):
        say(f"{NO_GRAPHS}: eager calls are tuned", as_json=as_json)
    dtypes = options.dtypes(spec)
    wanted = SweepSpec(
        op=spec.name,
        settings=replace(
            usual,
            trials=usual.trials if trials is None else trials,
            seed=seed,
            variants=tuple(known_variant(spec.name, name) for name in split(variants)),
            retry=retry,
        ),
        shapes=options.shapes(spec, ranks),
        dtypes=dtypes,
        modes=() if options.mode is None or usual.backend == "host" else modes_of(options.mode),
        reductions=tuple(check_option("reduction", name, spec) for name in split(reduction) or (None,)),
        layouts=tuple(check_option("layout", name, spec) for name in split(layout)),
        scalings=tuple(check_option("scaling", name, spec, dtype) for dtype in dtypes for name in split(scaling))
        or options.scalings(spec),
        input_kinds=kinds_of(options.input_kind),
        in_place={"no": (False,), "yes": (True,), "both": (False, True)}[in_place],
        budget_s=None if budget is None else parse_budget(budget),
        command=shlex.join(["tunedcomm", *sys.argv[1:]]),
        problems=tuple(missed),
    )
    try:
        problems = problems_of(wanted)  # before a database is made
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if dry_run:
        _show_plan(wanted, problems, db, as_json=as_json)
        return
    outcome, url = run_sweep(wanted, db, as_json=as_json)
    summary = _to_dict(outcome, url)
    show([summary] if missed else summary, report(outcome, url), as_json=as_json)
    _report_failures(outcome, wanted.settings.variants, db, as_json=as_json)


_PLAN_COLUMNS: dict[str, Callable[[dict[str, Any]], object]] = {
    **problem_columns("shape bytes dtype mode input", itemgetter("problem")),
    "candidates": lambda row: sum(row["candidates"].values()),
    "trials": lambda row: row["trials"],
    "variants": lambda row: ", ".join(row["candidates"]),
}


def _show_plan(spec: SweepSpec, problems: Sequence[Problem], database: str | None, *, as_json: bool) -> None:
    """Print a sweep's problems, the number of their candidates, and how long earlier sweeps took for as many trials."""
    from tunedcomm.symm.layout import limits_for
    from tunedcomm.tuner.machine import environment_of
    from tunedcomm.tuner.search.study import search_space

    environment = environment_of(spec.settings.backend)
    limits, rows = limits_for(environment, spec.settings.world_size), list[dict[str, Any]]()
    for problem in problems:
        found = Counter(candidate.variant for candidate in search_space(problem, limits, spec.settings))
        rows.append({"problem": problem, "candidates": found, "trials": min(found.total(), spec.settings.trials)})
    trials, trial_s = sum(row["trials"] for row in rows), _seconds_a_trial(database)
    seconds = None if trial_s is None else trials * trial_s
    if seconds is not None and spec.budget_s is not None:
        seconds = min(seconds, spec.budget_s)
    estimate = (
        "no earlier sweep says how long" if seconds is None else f"{duration(seconds)} at the pace of earlier sweeps"
    )
    title = f"{spec.settings.world_size} ranks on {environment}"
    end = f"at most {plural(trials, 'trial')} and the finals, {estimate}"
    plan = {"problems": rows, "trials": trials, "seconds": seconds}
    shown = rows[:_PRINTED] if spec.problems else rows  # of misses there may be thousands
    more = [f"… and {len(rows) - len(shown)} more"] if len(rows) > len(shown) else []
    show(plan, [Table.of(_PLAN_COLUMNS, shown, title), *more, end], as_json=as_json)


def _seconds_a_trial(database: str | None) -> float | None:
    """The seconds that a trial took in the sweeps of the nearest layer that has any; None if none has."""

    def read(opened: Database) -> tuple[float, int]:
        sweeps = {run.id: run for run in opened.runs() if run.finished_at and run.command.startswith("tunedcomm tune")}
        counts = Counter(trial.run_id for trial in opened.trials() if trial.run_id in sweeps)
        ended = [run for run in sweeps.values() if run.finished_at is not None and counts[run.id]]
        times = [(run.finished_at - run.started_at).total_seconds() for run in ended if run.finished_at is not None]
        return sum(times), counts.total()

    found = read_each(with_every_layer(database), read, is_quiet=True)
    return next((seconds / count for _, (seconds, count) in found if count), None)


def _report_failures(outcome: SweepOutcome, named: Sequence[str], database: str | None, *, as_json: bool) -> None:
    """Print what failed; exit with code 1 if a problem has no candidate or baseline, or a named variant runs nowhere.

    Variants are printed that were `named`, and others of which nothing runs.
    """
    lines: list[str] = []
    if count := outcome.num_skipped:
        whose = f"{plural(count, 'candidate')} failed in an earlier sweep and {'is' if count == 1 else 'are'}"
        lines.append(f"{whose} not tried again: after fixing a kernel raise its variant's `version`, or pass --retry")
    for summary in outcome.variants:
        lines += _failures_of(summary, database, is_named=summary.variant in named)
        if summary.variant in named and summary.num_ran:
            lines += [line for op in outcome.ops for line in _limits_of(op, summary.variant)]
    if outcome.unsolved:
        lines.append("no candidate runs: " + "; ".join(map(str, outcome.unsolved)))
    unreached = [result.problem for result in outcome.problems if not result.reached]
    if unreached:
        problems = plural(len(unreached), "problem") if len(unreached) > 1 else str(unreached[0])
        lines.append(f"the budget ended before {problems}: nothing is stored there; the same command goes on")
    without = [result.library_failure for result in outcome.problems if result.library_failure is not None]
    lines += [
        f"no baseline at {trial.problem}: the library {trial.status}: {trial.reason}; run the command again"
        for trial in without
    ]
    for line in dict.fromkeys(lines):
        say(line, as_json=as_json)
    is_broken = any(summary.is_broken and summary.variant in named for summary in outcome.variants)
    if outcome.unsolved or without or is_broken:
        raise typer.Exit(1)


def _failures_of(summary: VariantSummary, database: str | None, *, is_named: bool) -> list[str]:
    """Lines about a variant that failed or was infeasible."""
    name, lines = summary.variant, []
    if is_named and summary.infeasible:
        lines.append(f"{name} is infeasible for every problem of this sweep: {summary.infeasible}")
    if summary.is_broken:
        lines.append(f"{name}: none of {summary.num_failed} that were tried works")
    if summary.is_broken or (is_named and summary.failures):
        for first in summary.firsts:
            count = summary.failures[first.status]
            lines.append(f"{name}: {count} {first.status}, the first {first.candidate}: {first.reason}")
        lines.append(f"{name}: all trials: {show_command(summary.firsts[0].problem, database)}")
    return lines


def _limits_of(op: str, name: str) -> list[str]:
    """A line about a variant that ran but that calls do not get by default."""
    variant = variants(op).get(name)
    if variant is not None and not variant.waits_time_out:
        return [f"{name} was measured, and runs only when it is forced: it would wait for a lost peer for ever"]
    if variant is not None and not admits("default", variant.numerics):
        why = f"of ops that take it, or if forced: its class is {variant.numerics}"
        return [f'{name} was measured, and runs only in calls with numerics="any", {why}']
    return []


def run_sweep(
    spec: SweepSpec, database: str | None, *, as_json: bool = False, is_quiet: bool = False
) -> tuple[SweepOutcome, str]:
    """Run a sweep with its progress on stderr, `is_quiet` only on a terminal; returns its outcome and its database."""
    from tunedcomm.tuner.search.sweep import sweep

    with open_to_write(database, create=True, patience_s=settings.db_patience_s()) as (opened, url):
        ops = dict.fromkeys(problem.op for problem in spec.problems) or [spec.op]
        say(f"tuning {', '.join(ops)}, storing in {url}", as_json=as_json)
        stopped = "; what was measured is stored, and the same command goes on from there"
        with shown(stopped, as_json=as_json, is_quiet=is_quiet) as progress:
            return sweep(spec, opened, progress), url


def report(outcome: SweepOutcome, url: str) -> Iterator[str | Table]:
    """The summary."""
    where = "" if outcome.environment is None else f" on {outcome.environment}"
    for op in outcome.ops:
        results = [result for result in outcome.problems if result.problem.op == op]
        what = f"{op}, " if len(outcome.ops) > 1 else ""
        shown = [result for index, result in enumerate(results) if result.reached or index < _PRINTED]
        yield Table.of(_COLUMNS, shown, f"{what}{results[0].problem.world_size} ranks{where}")
        if more := len(results) - len(shown):
            yield f"… and {more} more, not reached"
    done = outcome.progress
    end = "out of time" if outcome.reason == "budget" else "done" if done.trials else "nothing left to measure"
    yield f"{end}: {plural(done.trials, 'trial')} in {done.elapsed_s:.0f} s, stored in {url} (run {outcome.run_id})"
    if outcome.compiled_ahead or done.num_compiled:
        waited = "" if outcome.compile_share is None else f", {outcome.compile_share:.1%} of the time"
        share = "" if done.bind_share is None else f"; {done.bind_share:.1%} of it went into binding in all"
        yield f"{plural(done.num_compiled, 'trial')} had to wait for the compiler{waited}{share}"
    if outcome.dropped:
        note(f"not tried any more, because they cost several gangs: {', '.join(outcome.dropped)}")


def _is_in_place(result: ProblemResult) -> bool:
    """True if the library's best form is in place, which the winner is not."""
    return result.best_library_us is not None and result.best_library_us != result.library_us


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
        problems.append(
            {**attributes(result, "problem library_us in_place_us speedup num_trials failures reached"), **best}
        )
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
    "layers": lambda model: model.num_layers,
    "hidden": lambda model: model.hidden_size,
    "ffn": lambda model: "-" if model.intermediate_size is None else model.intermediate_size,
    "expert": lambda model: "-" if model.experts is None else model.experts.intermediate_size,
    "experts": lambda model: "-" if model.experts is None else model.experts.num_experts,
    "heads": lambda model: model.num_heads,
    "kv": lambda model: "MLA" if model.latent is not None else model.num_kv_heads,
    "dim": lambda model: model.head_dim,
    "vocab": lambda model: model.vocab_size,
    "dtype": lambda model: model.dtype,
    "also": lambda model: ", ".join(model.aliases) or "-",
    "published": lambda model: model.source.published.partition(":")[0],
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
                f"the log says which problems to tune, so --{name.replace('_', '-')} cannot be combined with it; run "
                "the two sweeps one after the other",
            )
    if settings.miss_log() is False:
        raise bad_usage("--from-misses", "TUNEDCOMM_MISS_LOG switches the log off; unset it, or name the file to read")


def _missed_problems(op: str | None, *, world_size: int, backend: Backend, database: str | None) -> list[Problem]:
    """Problems in the log that are still not tuned here, op by op, most called first; says on stderr what was taken."""
    from tunedcomm import kernels
    from tunedcomm.db import misses as miss_log
    from tunedcomm.symm.layout import limits_for
    from tunedcomm.tuner.machine import environment_of

    path = miss_log.log_path()
    try:
        misses, skipped = miss_log.read(path)
    except OSError as error:
        raise DatabaseAccessError(
            f"cannot read the log of untuned problems, {path}: {error.strerror or error}; check it, or set "
            "TUNEDCOMM_MISS_LOG to another file"
        ) from None
    if skipped:
        note(f"skipped {plural(skipped, 'invalid line')} of {path}")
    kernels.discover()
    environment = environment_of(backend)
    limits = limits_for(environment, world_size)
    local = [miss for miss in misses if miss.hard_key == environment.hard_key and op in (None, miss.problem.op)]
    sized = [miss for miss in local if miss.problem.world_size == world_size]
    tuned = _tuned({miss.problem for miss in sized}, environment, world_size, database)
    wanted = [miss for miss in sized if miss.problem not in tuned and _can_be_tuned(miss.problem, limits)]
    with suppress(OSError):  # the log is as good without this
        if tuned or skipped or path.stat().st_size > _LARGE_BYTES:
            miss_log.compact(path, without={(environment.hard_key, problem) for problem in tuned})
    where = f"for {world_size} ranks on {environment}"
    if wanted:
        note(f"{plural(len(wanted), 'untuned problem')} {where} in {path}, most called first:")
    else:
        note(f"nothing to do: {path} holds no untuned problem {where}")
    for miss in wanted[:_PRINTED]:
        note(f"  {miss.count:>10} calls  {miss.problem}, served by {miss.source}")
    if len(wanted) > _PRINTED:
        note(f"  and {len(wanted) - _PRINTED} more")
    if others := sorted({miss.problem.world_size for miss in local} - {world_size}):
        note(f"the log also holds problems of world size {', '.join(map(str, others))}: pass --world-size for those")
    ops = list(dict.fromkeys(miss.problem.op for miss in wanted))
    return sorted((miss.problem for miss in wanted), key=lambda problem: ops.index(problem.op))


def _tuned(problems: set[Problem], environment: Environment, world_size: int, database: str | None) -> set[Problem]:
    """Problems that are pinned, or whose sweep ended with the current kernels."""
    from tunedcomm.db.layers import load_snapshot
    from tunedcomm.kernels import source_hash_of

    if not problems:
        return set()
    snapshot = load_snapshot(environment, world_size, layers=with_every_layer(database))
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
    from tunedcomm.tuner.search.spec import check_problem

    try:
        check_problem(problem)
    except ValueError:
        return False
    return problem.numel > 0 and why_no_kernel(problem, limits, "any") is None


_VERIFIED_COLUMNS: dict[str, Callable[[Verified], object]] = {
    **problem_columns("shape bytes dtype", attrgetter("winner.problem")),
    "mode": lambda result: f"{result.winner.problem.mode}, {kind_of(result.winner.problem)}",
    "winner": lambda result: f"{result.winner.candidate}{_if_asked(result.winner.policies)}",
    "then µs": lambda result: format_us(result.winner.row.latency_p50_us),
    "speed-up": lambda result: format_ratio(result.winner.library_us, result.winner.latency_us),
    "now µs": lambda result: format_us(result.latency_us),
    "library µs": lambda result: format_us(result.library_us),
    "now": lambda result: format_ratio(result.library_us, result.latency_us),
    "verdict": lambda result: result.verdict,
}


def db_verify(
    *,
    op: Annotated[list[str] | None, typer.Option(help="Only these ops.", autocompletion=complete_op)] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Only these dtypes.")] = None,
    mode: Annotated[SweptMode, typer.Option(help="Inside CUDA graphs, outside, or both.")] = "both",
    limit: Annotated[int | None, typer.Option(min=1, help="Most problems, other software first.")] = None,
    tolerance: Annotated[str, typer.Option(help="How much longer a winner may take, besides the noise.")] = "10%",
    world_size: Annotated[int | None, typer.Option(min=2, help="Ranks; by default all GPUs.")] = None,
    backend: BackendOption = None,
    gangs: GangsOption = "auto",
    db: Annotated[
        str | None, typer.Option(help="Database to verify and to write; by default every layer, and the user database.")
    ] = None,
    no_store: Annotated[bool, typer.Option("--no-store", help="Do not store the new timings.")] = False,
    borrowed: Annotated[bool, typer.Option("--borrowed", help="Only check what other hardware's rows serve.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Time this machine's stored winners again beside the library. Names winners that do not hold any more.

    Winners, runners-up and the library are checked as `tunedcomm tune` checks them, then timed as in its finals. The
    new timings are stored and dispatch uses them: after a new driver or a new torch this is all that is needed.

    Exit code 1 if a winner fails, cannot be measured, is slower than the library, or became slower by more than
    --tolerance, both in µs and relative to the library; or if nothing is stored for this machine. Progress goes
    to stderr, as with `tunedcomm tune`.

    With --borrowed alone: make the checks of all that siblings' rows serve now, so that programs need not make them at
    their first calls. Exit code 1 if a candidate failed.

    Example: tunedcomm db verify --tolerance 5% --no-store
    """
    if is_spare_copy():
        return
    if borrowed:
        if op or dtype or limit or db or no_store:
            raise bad_usage("--borrowed", "it goes with --world-size and --backend alone; leave the others out")
        _verify_borrowed(backend_or_default(backend), local_ranks(world_size, backend), as_json=as_json)
        return
    from tunedcomm.db.layers import named_layers
    from tunedcomm.tuner.machine import machine_settings
    from tunedcomm.tuner.verify import VerifySpec, verify

    spec = VerifySpec(
        settings=machine_settings(backend_or_default(backend), local_ranks(world_size, backend), parse_gangs(gangs)),
        ops=tuple(known_op(name).name for name in split(op)),
        dtypes=tuple(check_dtype(name) for name in split(dtype)),
        modes=modes_of(mode),
        limit=limit,
        tolerance=parse_share(tolerance),
        layers=None if db is None else tuple(named_layers(db)),
        command=shlex.join(["tunedcomm", *sys.argv[1:]]),
    )
    patience_s = settings.db_patience_s()
    target = nullcontext((None, None)) if no_store else open_to_write(db, create=db is None, patience_s=patience_s)
    with target as (opened, url):
        if spec.settings.backend == "host":
            say("verifying the host backend, whose timings say nothing about GPUs", as_json=as_json)
        say("timing the stored winners again" + ("" if url is None else f", storing in {url}"), as_json=as_json)
        with shown("" if url is None else "; what was measured is stored", as_json=as_json) as progress:
            outcome = verify(spec, opened, progress)
    show(_verified_to_dict(outcome, url), _verified_text(outcome, url), as_json=as_json)
    if outcome.wrong or not outcome.results:
        raise typer.Exit(1)


def _verify_borrowed(backend: Backend, world_size: int, *, as_json: bool) -> None:
    """Start ranks that check what is borrowed; anew after a candidate that ended them, which is not tried again."""
    from tunedcomm.tuner.gang.ranks import run_module

    variables = {"TUNEDCOMM_MISS_LOG": "0", "TUNEDCOMM_PEER_TIMEOUT_S": f"{settings.peer_timeout_s() or 10.0:g}"}
    variables |= {"CUDA_VISIBLE_DEVICES": ""} if backend == "host" else {}
    with tempfile.TemporaryDirectory(prefix="tunedcomm-checks-") as folder:
        result = Path(folder, "checks.json")
        for _ in range(_MOST_STARTS):
            code = run_module("tunedcomm.warmup", [str(result)], world_size=world_size, environment=variables)
            if not code:
                break
        else:
            raise TuningError(f"the ranks ended with code {code} {_MOST_STARTS} times; what they printed says why")
        checks = json.loads(result.read_text(encoding="utf-8"))
    counts = Counter(check["status"] for check in checks)
    rows = [(Problem.from_dict(c["problem"]), c["candidate"], c["status"], c["why"]) for c in checks]
    said = ", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "nothing is borrowed here"
    show(
        {"checks": checks},
        [*([Table(("problem", "candidate", "check", "why"), rows)] if rows else []), said],
        as_json=as_json,
    )
    if counts["failed"]:
        raise typer.Exit(1)


def _verified_text(outcome: VerifyOutcome, url: str | None) -> Iterator[str | Table]:
    machine = outcome.environment
    where = f"{outcome.world_size} ranks" + ("" if machine is None else f" on {machine}")
    if not outcome.results:
        yield f"no winner is stored for {where}; `tunedcomm tune` finds some, `tunedcomm db list` prints what there is"
        return
    yield Table.of(_VERIFIED_COLUMNS, outcome.results, where)
    if machine is not None:
        changes = sorted(
            {change for result in outcome.results for change in machine.drift(result.winner.row.environment)}
        )
        if changes:
            yield f"since they were measured: {', '.join(changes)}"
    for result in outcome.results:
        if result.verdict != "ok":
            yield f"{result.verdict}: {result.winner.problem}: {result.winner.candidate}: {result.why}"
        if result.faster is not None:
            now = f"{format_us(result.faster.score)} µs against {format_us(result.latency_us)} µs"
            yield f"overtaken: {result.winner.problem}: {result.faster.candidate} is faster now, {now}"
    stored = "nothing was stored" if url is None else f"stored in {url} (run {outcome.run_id})"
    yield (
        f"{len(outcome.wrong)} of {plural(len(outcome.results), 'winner')} do not hold any more; "
        f"{plural(outcome.num_trials, 'trial')} in {outcome.seconds:.0f} s, {stored}"
    )


def _if_asked(policies: Sequence[str]) -> str:
    return "" if "default" in policies else f" [numerics={policies[0]}]"


def _verified_to_dict(outcome: VerifyOutcome, url: str | None) -> dict[str, Any]:
    """As JSON has it."""
    from tunedcomm.selection.score import noise
    from tunedcomm.tuner.verify import uncertainty

    machine = outcome.environment
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
                    "changes": [] if machine is None else machine.drift(then.row.environment),
                },
                "measured": attributes(result, "latency_us library_us noise"),
                "faster": None if result.faster is None else result.faster.candidate,
                "faster_us": None if result.faster is None else result.faster.score,
            }
        )
    names = "run_id environment world_size num_trials num_gangs seconds"
    return {"database": url, **attributes(outcome, names), "num_wrong": len(outcome.wrong), "winners": winners}
