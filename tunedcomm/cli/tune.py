"""`tunedcomm tune`: measure candidates on this machine and store what they did."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from tunedcomm import settings
from tunedcomm.cli.options import (
    Backend,
    BackendOption,
    JsonOption,
    SweptKind,
    SweptMode,
    SweptPlace,
    backend_or_default,
    check_dtype,
    check_layout,
    check_reduction,
    check_scaling,
    check_shape,
    kinds_of,
    known_op,
    known_variant,
    local_ranks,
    modes_of,
    parse_budget,
    parse_gangs,
    split,
)
from tunedcomm.cli.output import (
    attributes,
    counted,
    emit,
    emit_json,
    format_ratio,
    format_us,
    kind_of,
    message_of,
    note,
    table_of,
)
from tunedcomm.cli.progress import say, shown
from tunedcomm.cli.stored import read_layers
from tunedcomm.errors import DatabaseAccessError, TuningError
from tunedcomm.spec import Problem, admits, format_shape, get_op, variants
from tunedcomm.tuner.models import DEFAULT_TOKENS, Model, catalog, find_model, shapes_for

if TYPE_CHECKING:
    from pathlib import Path

    from tunedcomm.db.misses import HardKey, Miss
    from tunedcomm.hardware import Environment
    from tunedcomm.selection.snapshot import Snapshot
    from tunedcomm.spec import Limits
    from tunedcomm.tuner.search.sweep import ProblemResult, SweepOutcome, SweepSpec, VariantSummary

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
    backend: BackendOption = None,
    reduction: Annotated[list[str] | None, typer.Option(help="Reductions. By default the op's first.")] = None,
    layout: Annotated[list[str] | None, typer.Option(help="Layouts (docs/ops.md). By default the op's first.")] = None,
    scaling: Annotated[list[str] | None, typer.Option(help="Scalings (docs/ops.md). Fp8: by default rowwise.")] = None,
    input_kind: Annotated[SweptKind, typer.Option(help="Whether peers can address the input.")] = "plain",
    in_place: Annotated[SweptPlace, typer.Option(help="Whether the result overwrites the input.")] = "no",
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
        if as_json:
            emit_json(list(catalog().values()))
        else:
            table_of(_MODEL_COLUMNS, catalog().values())
        return
    if is_spare_copy():
        note("another copy of this command tunes this host's GPUs; this one has nothing to do (start one a host)")
        return
    named = ModelOptions.of(model, tp=tp, tokens=tokens, shape=shape)
    ranks = local_ranks(named.ranks(world_size), backend)
    missed: dict[str, tuple[Problem, ...]] = {}
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
        raise typer.BadParameter("it is missing; pass e.g. --op all_reduce", param_hint="--op")
    spec = known_op(op)
    from tunedcomm.tuner.search.sweep import SweepSpec

    wanted = SweepSpec(
        op=spec.name,
        shapes=named.shapes(spec.name, ranks) or tuple(check_shape(text, spec) for text in split(shape)),
        dtypes=(dtypes := tuple(check_dtype(name, spec) for name in split(dtype) or named.dtypes or ["bfloat16"])),
        modes=() if mode is None else modes_of(mode),
        world_size=ranks,
        backend=backend,
        reductions=tuple(check_reduction(name, spec) for name in split(reduction)) or (check_reduction(None, spec),),
        layouts=tuple(check_layout(name, spec) for name in split(layout)),
        scalings=tuple(check_scaling(name, spec, one) for one in dtypes for name in split(scaling)),
        input_kinds=kinds_of(input_kind),
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
    _leave([outcome for outcome, _ in done], wanted.variants, db, as_json=as_json)


def _leave(outcomes: Sequence[SweepOutcome], named: Sequence[str], database: str | None, *, as_json: bool) -> None:
    """Say what failed; exit with code 1 if a problem has no candidate that runs, or a named variant runs nowhere."""
    for outcome in outcomes:
        for line in _fate_lines(outcome, named, database):
            say(line, as_json=as_json)
    unsolved = [problem for outcome in outcomes for problem in outcome.unsolved]
    if unsolved:
        say("no candidate runs: " + "; ".join(map(str, unsolved)), as_json=as_json)
    if unsolved or any(fate.is_broken and fate.variant in named for outcome in outcomes for fate in outcome.fates):
        raise typer.Exit(1)


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
    from tunedcomm.tuner.search.sweep import resolve, sweep

    if spec.backend is None and backend_or_default() == "host":
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


def report(outcome: SweepOutcome, url: str) -> None:
    """Print the summary on stdout."""
    where = "" if outcome.environment is None else f" on {outcome.environment}"
    ranks = outcome.problems[0].problem.world_size if outcome.problems else 0
    table_of(_COLUMNS, outcome.problems, title=f"{ranks} ranks{where}")
    end = "out of time" if outcome.reason == "budget" else "done"
    emit(f"{end}: {outcome.num_trials} trials in {outcome.seconds:.0f} s, stored in {url} (run {outcome.run_id})")
    if outcome.compiled_ahead or outcome.num_compiled:
        waited = "" if outcome.compile_share is None else f", {outcome.compile_share:.1%} of the time"
        share = "" if outcome.bind_share is None else f"; {outcome.bind_share:.1%} of it went into binding in all"
        emit(f"{outcome.num_compiled} trials had to wait for the compiler{waited}{share}")
    if outcome.dropped:
        note(f"left alone after they had cost several gangs: {', '.join(outcome.dropped)}")


def _best_us(result: ProblemResult) -> float | None:
    return None if result.best is None else result.best.latency_p50_us


def _to_dict(outcome: SweepOutcome, url: str) -> dict[str, Any]:
    """As JSON has it."""
    names = "run_id reason environment num_trials failures dropped num_skipped"
    costs = "num_gangs start_s num_compiled bind_share compile_share seconds"
    return {
        "database": url,
        **attributes(outcome, names),
        "variants": [
            {
                **attributes(fate, "variant num_ran failures infeasible"),
                "reasons": {first.status: first.reason for first in fate.firsts},
            }
            for fate in outcome.fates
        ],
        **attributes(outcome, costs),
        "problems": [
            {
                "problem": result.problem,
                "variant": None if result.best is None else result.best.variant,
                "config": None if result.best is None else result.best.config,
                "latency_p50_us": _best_us(result),
                **attributes(result, "library_us speedup num_trials failures"),
            }
            for result in outcome.problems
        ],
    }


def _fate_lines(outcome: SweepOutcome, named: Collection[str], database: str | None) -> Iterator[str]:
    """A line each for what was left out, for each way in which a variant fails, and for what dispatch will not run.

    Told are variants that were `named`, and others of which nothing runs.
    """
    op = outcome.problems[0].problem.op if outcome.problems else ""
    if count := outcome.num_skipped:
        whose, are = ("1 candidate", "is") if count == 1 else (f"{count} candidates", "are")
        yield (
            f"{whose} failed in an earlier sweep and {are} not tried again: after mending a kernel raise its variant's "
            "`version`, or pass --retry"
        )
    for fate in outcome.fates:
        if fate.variant in named and fate.infeasible:
            yield f"{fate.variant} is infeasible for every problem of this sweep: {fate.infeasible}"
        if fate.is_broken or (fate.variant in named and fate.failures):
            yield from _failures(fate, database)
        if fate.variant in named and fate.num_ran:
            yield from _not_by_default(op, fate.variant)


def _not_by_default(op: str, name: str) -> Iterator[str]:
    variant = variants(op).get(name)
    if variant is not None and not variant.bounded:
        yield f"{name} was measured, and runs only when it is forced: it would wait for a lost peer for ever"
    elif variant is not None and not admits("default", variant.numerics):
        yield (
            f'{name} was measured, and runs only in calls with numerics="any", of ops that take it, or if forced: '
            f"its class is {variant.numerics}"
        )


def _failures(fate: VariantSummary, database: str | None) -> Iterator[str]:
    if fate.is_broken:
        yield f"{fate.variant}: none of {sum(fate.failures.values())} that were tried works"
    for first in fate.firsts:
        count = f"{fate.failures[first.status]} {first.status}"
        yield f"{fate.variant}: {count}, the first {first.candidate}: {first.reason}"
    yield f"{fate.variant}: all trials: {show_command(fate.firsts[0].problem, database)}"


def show_command(problem: Problem, database: str | None) -> str:
    """The command that prints every trial of a problem."""
    words = ["tunedcomm", "db", "show", "--op", problem.op, "--shape", format_shape(problem.shape)]
    words += ["--world-size", str(problem.world_size), "--dtype", problem.dtype, "--mode", problem.mode]
    if problem.reduction and problem.reduction not in get_op(problem.op).reductions[:1]:
        words += ["--reduction", problem.reduction]
    if problem.input_kind != "plain":
        words += ["--input-kind", problem.input_kind]
    words += ["--in-place"] if problem.in_place else []
    words += ["--layout", problem.layout] if problem.layout else []
    words += ["--scaling", problem.scaling] if problem.scaling else []
    return shlex.join([*words, *(["--db", database] if database else [])])


TokensOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--tokens",
        help="Tokens a step of --model; by default the powers of two from "
        f"{DEFAULT_TOKENS[0]} to {DEFAULT_TOKENS[-1]}.",
    ),
]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The options that tune a model's shapes, as typed on the command line."""

    models: tuple[Model, ...]
    tp: int | None
    tokens: tuple[int, ...]

    @classmethod
    def of(
        cls, names: list[str] | None, *, tp: int | None, tokens: list[str] | None, shape: list[str] | None
    ) -> ModelOptions:
        """Look the models up.

        Raises:
            BadParameter: options that do not go together, or a count of tokens that is none.
            UnknownNameError: no such model.
        """
        models = tuple(find_model(name) for name in split(names))
        if models and split(shape):
            raise typer.BadParameter(
                "a model's shapes and shapes of your own are two sweeps: pass --model or --shape, then the other",
                param_hint="--model",
            )
        for option, value in (("--tp", tp), ("--tokens", tokens)):
            if not models and value is not None:
                raise typer.BadParameter("it needs a model: pass --model as well", param_hint=option)
        return cls(models=models, tp=tp, tokens=tuple(_count(text) for text in split(tokens)) or DEFAULT_TOKENS)

    @property
    def dtypes(self) -> list[str]:
        """The models' dtypes, each once."""
        return list(dict.fromkeys(model.dtype for model in self.models))

    def ranks(self, world_size: int | None) -> int | None:
        """The world size, which is the degree of tensor parallelism where both are given.

        Raises:
            BadParameter: they are given and differ.
        """
        if self.tp is not None and world_size is not None and self.tp != world_size:
            raise typer.BadParameter(
                f"--tp {self.tp} and --world-size {world_size} are the same number for a model; pass one of them",
                param_hint="--tp",
            )
        return self.tp or world_size

    def shapes(self, op: str, world_size: int) -> tuple[tuple[int, ...], ...]:
        """The op's shapes in all of the models; none where no model is given.

        Raises:
            UnsupportedInputError: the models do not split over that many ranks, or the op has no shapes of models.
        """
        return shapes_for(self.models, world_size, self.tokens, op) if self.models else ()


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{text!r} is not a number of tokens, 1 or more", param_hint="--tokens")
    return int(text)


# Options that say which problems to tune, as the log does.
_ABOUT_PROBLEMS = "shape model tp tokens dtype mode reduction input_kind in_place layout scaling".split()
_PRINTED = 20
# A log of this size is made smaller when it is read.
_LARGE_BYTES = 64 << 10

_DETECT = "import json; from tunedcomm.hardware import detect; print(json.dumps(detect(0).to_dict()))"


def _check_alone(context: typer.Context) -> None:
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


def _missed_problems(
    op: str | None, *, world_size: int, backend: Backend, database: str | None
) -> dict[str, tuple[Problem, ...]]:
    """Op to its problems in the log that are still not tuned here, most called first; says on stderr what was taken.

    Args:
        op: only this op.
        world_size: of the sweep.
        backend: of the sweep.
        database: where the sweep stores its trials, if not in the user database.

    Raises:
        DatabaseAccessError: the log cannot be read.
        TuningError: this machine's GPUs cannot be found out.
    """
    from tunedcomm import kernels
    from tunedcomm.db import misses as miss_log
    from tunedcomm.symm.layout import limits_for

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
    environment = _environment(backend)
    limits = limits_for(environment, world_size)
    here = [miss for miss in misses if miss.hard_key == environment.hard_key and op in (None, miss.problem.op)]
    sized = [miss for miss in here if miss.problem.world_size == world_size]
    known = _Known.load(environment, world_size, database) if sized else None
    tuned = {miss.problem for miss in sized if known is not None and known.is_tuned(miss.problem)}
    wanted = [miss for miss in sized if miss.problem not in tuned and _can_be_tuned(miss.problem, limits)]
    _make_smaller(path, {(environment.hard_key, problem) for problem in tuned}, skipped)
    _say_missed(wanted, path, str(environment), world_size)
    if others := sorted({miss.problem.world_size for miss in here} - {world_size}):
        note(f"the log also holds problems of world size {', '.join(map(str, others))}: pass --world-size for those")
    found: dict[str, tuple[Problem, ...]] = {}
    for miss in wanted:
        found[miss.problem.op] = (*found.get(miss.problem.op, ()), miss.problem)
    return found


@dataclass(frozen=True, slots=True)
class _Known:
    """Stored trials of the sweep's environment and world size."""

    snapshot: Snapshot

    @classmethod
    def load(cls, environment: Environment, world_size: int, database: str | None) -> _Known:
        from tunedcomm.db.layers import is_absent, load_snapshot, named_layers

        layers = list(read_layers(None))
        if database is not None:
            layers[:0] = [layer for layer in named_layers(database) if not is_absent(layer)]
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


def _environment(backend: Backend) -> Environment:
    """That of this machine, of its first GPU or of the host backend; leaves no GPU context in this process."""
    from tunedcomm.hardware import Environment, detect

    if backend == "host":
        return detect(None)
    done = subprocess.run([sys.executable, "-c", _DETECT], capture_output=True, text=True, check=False)
    try:
        return Environment.from_dict(json.loads(done.stdout))
    except ValueError:
        last = done.stderr.strip().rpartition("\n")[2]
        raise TuningError(f"the first GPU cannot be looked at: {last}; run `tunedcomm doctor`") from None


def _make_smaller(path: Path, tuned: Collection[tuple[HardKey, Problem]], skipped: int) -> None:
    """Take out what is tuned by now and what makes no sense; the log is as good without this."""
    from tunedcomm.db import misses as miss_log

    with contextlib.suppress(OSError):
        if tuned or skipped or path.stat().st_size > _LARGE_BYTES:
            miss_log.compact(path, without=tuned)


def _say_missed(wanted: Sequence[Miss], path: Path, environment: str, world_size: int) -> None:
    if not wanted:
        note(f"nothing to do: {path} holds no untuned problem for {world_size} ranks on {environment}")
        return
    note(f"{len(wanted)} untuned problems for {world_size} ranks on {environment} in {path}, most called first:")
    for miss in wanted[:_PRINTED]:
        note(f"  {miss.count:>10} calls  {miss.problem}, served by {miss.source}")
    if len(wanted) > _PRINTED:
        note(f"  and {len(wanted) - _PRINTED} more")
