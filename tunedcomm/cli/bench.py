"""`tunedcomm bench`: tuned, library and every other contender on the same problems in one run."""

from __future__ import annotations

import json
import secrets
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tunedcomm.cli._gang import local_ranks, num_gpus, run_module
from tunedcomm.cli._options import (
    BorrowOption,
    JsonOption,
    LayoutOption,
    OpOption,
    ScalingOption,
    SweptKind,
    SweptMode,
    borrowed,
    check_dtype,
    check_layout,
    check_problem,
    check_scaling,
    check_shape,
    known_op,
    split,
)
from tunedcomm.cli._output import emit_json, format_bytes, format_ratio, format_us, note, table
from tunedcomm.shapes import format_shape
from tunedcomm.spec import ITEMSIZE, Problem

__all__ = ["bench"]

COLUMNS = (
    "message",
    "shape",
    "dtype",
    "mode",
    "contender",
    "p10 us",
    "p50 us",
    "p90 us",
    "algbw",
    "busbw",
    "vs library",
    "error",
)


def bench(
    *,
    op: OpOption,
    shape: Annotated[list[str] | None, typer.Option(help="Shapes. By default the op's sweep.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Dtypes. By default bfloat16.")] = None,
    world_size: Annotated[int | None, typer.Option(min=1, help="Ranks; by default all GPUs.")] = None,
    mode: Annotated[
        SweptMode | None, typer.Option(help="Inside CUDA graphs, outside, or both. Default: graph, eager on the host.")
    ] = None,
    input_kind: Annotated[SweptKind, typer.Option(help="Whether peers can address the input.")] = SweptKind.plain,
    layout: LayoutOption = None,
    scaling: ScalingOption = None,
    contender: Annotated[
        list[str] | None,
        typer.Option(help="Of tuned, library, the variants, cublas and other peers. By default all that run."),
    ] = None,
    borrow: BorrowOption = None,
    csv: Annotated[Path | None, typer.Option(help="Append the rows to this CSV file.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Compare what dispatch runs with the library and every other contender, in one run.

    Options with several values may be repeated or take them separated by commas.

    The contender cublas is the GEMM of a fused op alone. Fused GEMMs are timed with inputs that are not in the cache:
    launches take copies of them in turn. All other ops find them there, as what was just produced is.

    Example: tunedcomm bench --op all_reduce --shape 4096,1048576 --csv results.csv

    Example: tunedcomm bench --op gemm_rs --shape 4096x8192x3584 --layout nk
    """
    spec = known_op(op)
    ranks = local_ranks(world_size)
    on_gpu = num_gpus() >= 2
    modes = (mode or (SweptMode.graph if on_gpu else SweptMode.eager)).values
    dtypes = [check_dtype(name, spec) for name in split(dtype) or ["bfloat16"]]
    shapes = [check_shape(text, spec) for text in split(shape)]
    if not shapes:
        shapes = spec.default_shapes("cuda" if on_gpu else "host", ITEMSIZE[dtypes[0]])
    for extents in shapes:
        check_problem(Problem(spec.name, extents, dtypes[0], ranks))
    job = {
        "op": spec.name,
        "shapes": [format_shape(extents) for extents in shapes],
        "dtypes": dtypes,
        "modes": list(modes),
        "input_kinds": list(input_kind.values),
        "layout": check_layout(layout, spec),
        "scalings": {name: check_scaling(scaling, spec, name) for name in dtypes},
        "contenders": split(contender) or None,
        "csv": None if csv is None else str(csv.absolute()),
        "seed": seed,
        "run_id": secrets.token_hex(6),
        "command": shlex.join(["tunedcomm", *sys.argv[1:]]),
    }
    note(f"comparing {len(shapes)} shapes of {spec.name} on {ranks} ranks")
    rows = _run(job, ranks, borrowed(borrow))
    if as_json:
        emit_json(rows)
    else:
        table(COLUMNS, [_cells(row, rows) for row in rows], title=_title(rows))


def _run(job: Mapping[str, Any], world_size: int, borrow: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of the result file that rank 0 writes; leaves with code 1 if the gang failed."""
    with tempfile.TemporaryDirectory(prefix="tunedcomm-bench-") as folder:
        job_file, result_file = Path(folder, "job.json"), Path(folder, "result.json")
        job_file.write_text(json.dumps(job), encoding="utf-8")
        arguments = [str(job_file), str(result_file)]
        # What a benchmark calls is not what anybody misses.
        variables = {"TUNEDCOMM_MISS_LOG": "0", "TUNEDCOMM_BORROW": ",".join(borrow)}
        code = run_module("tunedcomm.cli._bench_rank", arguments, world_size=world_size, environment=variables)
        if code or not result_file.exists():
            note(f"the benchmark's ranks ended with code {code}; what they printed above says why")
            raise typer.Exit(1)
        rows: list[dict[str, Any]] = json.loads(result_file.read_text(encoding="utf-8"))["rows"]
        return rows


def _library_us(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The library's median on the problem of `row`."""
    same = ("shape", "dtype", "mode", "world_size", "input_kind")
    for other in rows:
        if other["contender"] == "library" and all(other.get(name) == row.get(name) for name in same):
            return float(other["latency_p50_us"])
    return None


def _cells(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    latency = row["latency_p50_us"]
    name = f"tuned = {row['config']}" if row["contender"] == "tuned" else row["contender"]
    return [
        format_bytes(row["message_bytes"]),
        str(row["shape"]),
        row["dtype"],
        row["mode"],
        name,
        *(format_us(row[f"latency_{quantile}_us"]) for quantile in ("p10", "p50", "p90")),
        *("-" if row[column] is None else f"{row[column]:.2f}" for column in ("algbw_gb_s", "busbw_gb_s")),
        format_ratio(_library_us(row, rows), latency),
        "-" if row["error"] is None else f"{row['error']:.1e}",
    ]


def _title(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "nothing ran"
    row = rows[0]
    versions = ", ".join(f"{name} {row[name]}" for name in ("torch", "triton", "nccl") if row.get(name))
    return f"{row['op']} on {row['world_size']} x {row['gpu']} ({row['fabric']}), {versions}; bandwidths in 1e9 bytes/s"
