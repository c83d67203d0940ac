"""`tunedcomm bench`: tuned, library and every other contender on the same problems in one run."""

from __future__ import annotations

import itertools
import secrets
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from csv import Error as CsvError
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import typer

from tunedcomm.bench.csv import CUBLAS
from tunedcomm.cli.options import (
    NO_GRAPHS,
    BorrowOption,
    JsonOption,
    LayoutOption,
    LinkOption,
    OpOption,
    ScalingOption,
    SweepOptions,
    backend_or_default,
    bad_usage,
    borrowed,
    check_option,
    check_problem,
    check_seed,
    complete_variant,
    kinds_of,
    known_op,
    modes_of,
    split,
    takes,
)
from tunedcomm.cli.output import Table, emit, format_ratio, note, show
from tunedcomm.cli.progress import Now
from tunedcomm.metrics import format_us, plural
from tunedcomm.spec import ITEMSIZE, Problem, did_you_mean, ops, variants

_problem = itemgetter("shape", "dtype", "mode", "world_size", "input_kind")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options(SweepOptions):
    op: OpOption
    world_size: Annotated[int | None, typer.Option(min=1, help="Ranks; by default all GPUs.")] = None


@takes(_Options)
def bench(
    options: _Options,
    *,
    layout: LayoutOption = None,
    scaling: ScalingOption = None,
    contender: Annotated[
        list[str] | None,
        typer.Option(help="tuned, library, a variant, cublas, a peer.", autocompletion=complete_variant),
    ] = None,
    peers: Annotated[list[str] | None, typer.Option(help="Adapters of other projects: files, folders.")] = None,
    link_gb_s: LinkOption = None,
    borrow: BorrowOption = None,
    csv: Annotated[Path | None, typer.Option(help="Append the rows to this CSV file.")] = None,
    seed: Annotated[int, typer.Option(callback=check_seed, help="Seed of the inputs.")] = 0,
    skew: Annotated[bool, typer.Option("--skew", help="Half of all tokens go to one expert.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare dispatch with NCCL (gloo on CPUs) and other contenders. They take turns in one run.

    Inputs are in the cache; only launches of fused GEMMs take turns with copies of theirs. The contender cublas is the
    GEMM of a fused op alone. A peer that cannot run a problem or is wrong is left out with a note.

    Example: tunedcomm bench --op all_reduce --shape 4096,1048576 --mode both

    Example: tunedcomm bench --op gemm_rs --shape 4096x8192x3584 --csv rows.csv
    """
    from tunedcomm.bench.csv import missing_columns

    spec = known_op(options.op)
    if skew and not spec.skewed_inputs:
        able = ", ".join(name for name, other in ops().items() if other.skewed_inputs)
        raise bad_usage("--skew", f"{spec.name} has no experts; {able} have")
    ranks = options.ranks()
    backend = backend_or_default()
    modes = modes_of(options.mode or "graph") if backend == "cuda" else ("eager",)
    if backend == "host" and options.mode in ("graph", "both"):
        note(f"{NO_GRAPHS}: eager calls are measured")
    dtypes = options.dtypes(spec)
    shapes = options.shapes(spec, ranks) or spec.default_shapes(backend, ITEMSIZE[dtypes[0]])
    layout = check_option("layout", layout, spec)
    scalings = {dtype: check_option("scaling", scaling, spec, dtype) for dtype in dtypes}
    problems = [
        check_problem(
            Problem(
                spec.name,
                shape,
                dtype,
                ranks,
                reduction=next(iter(spec.reductions), ""),
                input_kind=kind,
                in_place=kind == "symmetric" and spec.in_place,
                layout=layout,
                scaling=scalings[dtype],
                mode=mode,
            )
        )
        for mode, kind, dtype, shape in itertools.product(modes, kinds_of(options.input_kind), dtypes, shapes)
    ]
    files = _adapter_files(peers or [])
    if csv is not None:
        # Before anything is measured.
        try:
            missing = missing_columns(csv)
        except (OSError, UnicodeDecodeError, CsvError) as error:
            raise bad_usage("--csv", f"{csv} cannot be appended to: {error}") from None
        if missing:
            why = f"is another program's table: it lacks the columns {', '.join(missing)}; name another file"
            raise bad_usage("--csv", f"{csv} {why}")
    job = {
        "problems": [problem.to_dict() for problem in problems],
        "contenders": _check_contenders(split(contender), spec.name, files) or None,
        "peers": [str(path) for path in files],
        "link_gb_s": link_gb_s,
        "csv": None if csv is None else str(csv.absolute()),
        "seed": seed,
        "inputs": spec.skewed_inputs if skew else "random",
        "run_id": secrets.token_hex(6),
        "command": shlex.join(["tunedcomm", *sys.argv[1:]]),
    }
    from tunedcomm.bench.runner import run_job

    note(f"comparing {plural(len(shapes), 'shape')} of {spec.name} on {ranks} ranks")
    rows: list[dict[str, Any]] = []
    left_out: list[dict[str, str]] = []
    now = Now()

    def take(line: dict[str, Any]) -> None:
        """Show what rank 0 of the benchmark reports: a problem's rows as soon as it ends."""
        now.show(line.get("now", ""))
        if line.get("rows") and not as_json:
            emit(_table(line["rows"], with_title=not rows))
            _print_best_other(line["rows"])
            sys.stdout.flush()
        rows.extend(line.get("rows", ()))
        left_out.extend(line.get("left_out", ()))

    try:
        run_job(job, ranks, borrowed(borrow), on_line=take)
    finally:  # after Ctrl-C, too
        now.show("")
        _print_left_out(left_out)
        show(rows, [], as_json=as_json)
    if not rows and not as_json:
        emit("nothing ran")


def _adapter_files(targets: Sequence[str]) -> list[Path]:
    """The files that `--peers` names: a file, or all files of a directory whose names do not begin with `_`."""
    found: list[Path] = []
    for target in targets:
        path = Path(target)
        files = sorted(path.glob("[!_]*.py")) if path.is_dir() else [path]
        if not files or not all(file.is_file() and file.suffix == ".py" for file in files):
            raise bad_usage(
                "--peers",
                f"{target!r} is neither a Python file nor a folder of them; bench/peers of the repository is one",
            )
        found += [file.absolute() for file in files]
    names = [file.stem for file in found]
    for name in names:
        if names.count(name) > 1:
            raise bad_usage("--peers", f"two adapters are named {name}; contenders go by name")
    return found


def _check_contenders(names: list[str], op: str, files: Sequence[Path]) -> list[str]:
    """Refuse as bad usage an unknown contender; known ones that cannot run here are left out later."""
    from tunedcomm.bench.contenders import TORCH_PEERS

    peers = [adapter.name for adapter in TORCH_PEERS] + [file.stem for file in files]
    known = ["tuned", *variants(op), CUBLAS, *peers]
    for name in names:
        if name not in known:
            raise bad_usage(
                "--contender",
                f"{name!r} is not a contender of {op}{did_you_mean(name, known)} They are {', '.join(known)}; "
                "--peers adds other projects' kernels",
            )
    return names


def _name(row: Mapping[str, Any]) -> str:
    """The contender, with its config."""
    config, contender = row["config"], row["contender"]
    if contender == "tuned":
        return f"tuned = {config}"
    if config.startswith(f"{contender}("):  # a variant of ours
        return str(config)
    return f"{contender} ({config})" if config and contender != "library" else str(contender)


def _optional(name: str, form: str) -> Callable[[Mapping[str, Any]], str]:
    """The cell of a figure that may be missing."""
    return lambda row: "-" if row.get(name) is None else format(row[name], form)


# As nccl-tests has them: bandwidths in 1e9 bytes/s, `ceiling` the share of what the links can carry or of a GEMM alone,
# `library` its time over this one, `SMs` the blocks at most.
_COLUMNS: dict[str, Callable[[Mapping[str, Any]], object]] = {
    "bytes": itemgetter("message_bytes"),
    "shape": itemgetter("shape"),
    "type": itemgetter("dtype"),
    "redop": lambda row: row.get("reduction") or "none",
    "mode": itemgetter("mode"),
    "p10 µs": lambda row: format_us(row["latency_p10_us"]),
    "p50 µs": lambda row: format_us(row["latency_p50_us"]),
    "p90 µs": lambda row: format_us(row["latency_p90_us"]),
    "algbw GB/s": _optional("algbw_gb_s", ".2f"),
    "busbw GB/s": _optional("busbw_gb_s", ".2f"),
    "ceiling": _optional("ceiling_share", ".1%"),
    "library": lambda row: format_ratio(row["library_us"], row["latency_p50_us"]),
    "SMs": _optional("num_sms", "d"),
    "error": _optional("error", ".1e"),
    "contender": _name,
}


def _table(rows: Sequence[Mapping[str, Any]], *, with_title: bool) -> Table:
    """A problem's rows, each beside the library."""
    library: dict[object, float] = {}
    for row in rows:
        if row["contender"] == "library":
            library.setdefault(_problem(row), row["latency_p50_us"])
    first = rows[0]
    versions = ", ".join(f"{name} {first[name]}" for name in ("torch", "triton", "nccl") if first.get(name))
    title = f"{first['op']} on {first['world_size']} x {first['gpu']} ({first['fabric']}), {versions}"
    rows = [{**row, "library_us": library.get(_problem(row))} for row in rows]
    return Table.of(_COLUMNS, rows, title if with_title else "")


def _print_best_other(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the fastest contender of a problem that is not ours, and its time over dispatch's."""
    ours = {"tuned", CUBLAS, *variants(rows[0]["op"])} - {"library"}
    tuned_us = [row["latency_p50_us"] for row in rows if row["contender"] == "tuned"]
    others = [row for row in rows if row["contender"] not in ours]
    if tuned_us and others:
        best = min(others, key=itemgetter("latency_p50_us"))
        emit(f"best other: {_name(best)}, {format_ratio(best['latency_p50_us'], tuned_us[0])} the time of tuned")


def _print_left_out(left_out: Sequence[Mapping[str, str]]) -> None:
    """Note the contenders that were left out, where, and why; a line for each reason."""
    where: dict[tuple[str, str], dict[str, None]] = {}
    for one in left_out:
        where.setdefault((one["peer"], one["why"]), {})[f"{one['shape']} {one['dtype']} {one['mode']}"] = None
    for (peer, why), problems in where.items():
        first, *others = problems
        more = f" and {len(others)} more" if others else ""
        note(f"left out: {peer} at {first}{more}: {why}")
