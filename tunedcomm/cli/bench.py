"""`tunedcomm bench`: tuned, library and every other contender on the same problems in one run."""

from __future__ import annotations

import secrets
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from csv import Error as CsvError
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tunedcomm.cli.options import (
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
    kinds_of,
    known_op,
    modes_of,
    split,
    takes,
)
from tunedcomm.cli.output import emit, emit_json, format_ratio, format_us, note
from tunedcomm.spec import ITEMSIZE, Problem, did_you_mean, format_shape, variants

_SAME = ("shape", "dtype", "mode", "world_size", "input_kind")


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
        list[str] | None, typer.Option(help="Of tuned, library, the variants, cublas and the peers; by default all.")
    ] = None,
    peers: Annotated[
        list[str] | None, typer.Option(help="Adapters for other projects: Python files, or directories of some.")
    ] = None,
    link_gb_s: LinkOption = None,
    borrow: BorrowOption = None,
    csv: Annotated[Path | None, typer.Option(help="Append the rows to this CSV file.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Compare what dispatch runs with the variant `library` (NCCL, gloo on CPUs) and every other contender, in one run.

    Options with several values may be repeated or take them separated by commas.

    The contender cublas is the GEMM of a fused op alone. Fused GEMMs are timed with inputs that are not in the cache:
    launches take turns with copies of them. Inputs of all other ops are in the cache, as if just produced.

    The results of --peers are compared with the reference before they are timed. A peer that is not installed, cannot
    run a problem or is wrong is left out, and stderr says why.

    Example: tunedcomm bench --op all_reduce --shape 4096,1048576 --csv results.csv

    Example: tunedcomm bench --op all_reduce --mode both --peers bench/peers

    Example: tunedcomm bench --op gemm_rs --shape 4096x8192x3584 --layout nk
    """
    from tunedcomm.bench.csv import missing_columns

    spec = known_op(options.op)
    ranks = options.ranks()
    backend = backend_or_default()
    modes = modes_of(options.mode or ("graph" if backend == "cuda" else "eager"))
    dtypes = options.dtypes(spec)
    shapes = options.shapes(spec, ranks) or spec.default_shapes(backend, ITEMSIZE[dtypes[0]])
    for extents in shapes:
        check_problem(Problem(spec.name, extents, dtypes[0], ranks))
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
        "op": spec.name,
        "shapes": [format_shape(extents) for extents in shapes],
        "dtypes": dtypes,
        "modes": list(modes),
        "input_kinds": list(kinds_of(options.input_kind)),
        "layout": check_option("layout", layout, spec),
        "scalings": {name: check_option("scaling", scaling, spec, name) for name in dtypes},
        "contenders": _check_contenders(split(contender), spec.name, files) or None,
        "peers": [str(path) for path in files],
        "link_gb_s": link_gb_s,
        "csv": None if csv is None else str(csv.absolute()),
        "seed": seed,
        "run_id": secrets.token_hex(6),
        "command": shlex.join(["tunedcomm", *sys.argv[1:]]),
    }
    from tunedcomm.bench.runner import run_job

    note(f"comparing {len(shapes)} shapes of {spec.name} on {ranks} ranks")
    found = run_job(job, ranks, borrowed(borrow))
    _print_left_out(found["left_out"])
    if as_json:
        emit_json(found["rows"])
    else:
        _print_table(found["rows"])


def _adapter_files(targets: Sequence[str]) -> list[Path]:
    """The files that `--peers` means: each target one, or all of a directory but those that begin with `_`."""
    found: list[Path] = []
    for target in targets:
        path = Path(target)
        files = sorted(path.glob("[!_]*.py")) if path.is_dir() else [path]
        if not files or not all(file.is_file() and file.suffix == ".py" for file in files):
            raise bad_usage(
                "--peers",
                f"{target!r} is no Python file and no directory of some; bench/peers of the repository is one",
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
    from tunedcomm.bench.csv import CUBLAS

    peers = [adapter.name for adapter in TORCH_PEERS] + [file.stem for file in files]
    known = ["tuned", *variants(op), CUBLAS, *peers]
    for name in names:
        if name not in known:
            raise bad_usage(
                "--contender",
                f"{name!r} is no contender of {op}{did_you_mean(name, known)} They are {', '.join(known)}; "
                "--peers adds other projects' kernels",
            )
    return names


def _library_us(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The library's median on the problem of `row`."""
    for other in rows:
        if other["contender"] == "library" and all(other.get(name) == row.get(name) for name in _SAME):
            return float(other["latency_p50_us"])
    return None


def _optional(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _name(row: Mapping[str, Any]) -> str:
    """The contender, with its config."""
    config, contender = row["config"], row["contender"]
    if contender == "tuned":
        return f"tuned = {config}"
    if config.startswith(f"{contender}("):  # a variant of ours
        return str(config)
    return f"{contender} ({config})" if config and contender != "library" else str(contender)


# Column to its unit and cell, as nccl-tests has them.
_COLUMNS: dict[str, tuple[str, Callable[[Mapping[str, Any]], str]]] = {
    "size": ("(B)", lambda row: str(row["message_bytes"])),
    "shape": ("(elements)", lambda row: row["shape"]),
    "type": ("", lambda row: row["dtype"]),
    "redop": ("", lambda row: row.get("reduction") or "none"),
    "mode": ("", lambda row: row["mode"]),
    "p10": ("(us)", lambda row: format_us(row["latency_p10_us"])),
    "p50": ("(us)", lambda row: format_us(row["latency_p50_us"])),
    "p90": ("(us)", lambda row: format_us(row["latency_p90_us"])),
    "algbw": ("(GB/s)", lambda row: _optional(row["algbw_gb_s"], ".2f")),
    "busbw": ("(GB/s)", lambda row: _optional(row["busbw_gb_s"], ".2f")),
    "ceiling": ("(share)", lambda row: _optional(row.get("ceiling_share"), ".1%")),
    "library": ("(ratio)", lambda row: format_ratio(row["library_us"], row["latency_p50_us"])),
    "SMs": ("", lambda row: _optional(row.get("num_sms"), "d")),
    "error": ("", lambda row: _optional(row["error"], ".1e")),
    "contender": ("", _name),
}


def _print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows on stdout, nccl-tests' way: figures to the right, and what is no figure is a comment."""
    if not rows:
        emit("# nothing ran")
        return
    first = rows[0]
    versions = ", ".join(f"{name} {first[name]}" for name in ("torch", "triton", "nccl") if first.get(name))
    emit(f"# {first['op']} on {first['world_size']} x {first['gpu']} ({first['fabric']}), {versions}")
    emit(
        "# times of the slowest rank; bandwidths in 1e9 bytes/s; ceiling: share of what the links can carry, or a GEMM"
    )
    emit("# alone; library: its time over this one; SMs: blocks that it occupies at most")
    emit("#")
    lines = [list(_COLUMNS), [unit for unit, _ in _COLUMNS.values()]]
    for row in rows:
        compared = {**row, "library_us": _library_us(row, rows)}
        lines.append([cell(compared) for _, cell in _COLUMNS.values()])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for number, line in enumerate(lines):
        cells = [text.rjust(width) for text, width in zip(line[:-1], widths, strict=False)]
        emit(f"{'#' if number < 2 else ' '} {'  '.join([*cells, line[-1]])}".rstrip())


def _print_left_out(left_out: Sequence[Mapping[str, str]]) -> None:
    """Note the peers that were left out, where, and why; a line for each reason."""
    where: dict[tuple[str, str], dict[str, None]] = {}
    for one in left_out:
        where.setdefault((one["peer"], one["why"]), {})[f"{one['shape']} {one['dtype']} {one['mode']}"] = None
    for (peer, why), problems in where.items():
        first, *others = problems
        more = f" and {len(others)} more" if others else ""
        note(f"left out: {peer} at {first}{more}: {why}")
