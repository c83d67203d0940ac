"""`tunedcomm bench`: tuned, library and every other contender on the same problems in one run."""

from __future__ import annotations

import json
import secrets
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from csv import Error as CsvError
from csv import reader
from pathlib import Path
from typing import Annotated, Any

import typer

from tunedcomm.cli._bench_table import print_left_out, print_table
from tunedcomm.cli._gang import local_ranks, num_gpus, run_module
from tunedcomm.cli._models import ModelOptions, TokensOption
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
from tunedcomm.cli._output import emit_json, note
from tunedcomm.cli._peer_files import adapter_files
from tunedcomm.spec import ITEMSIZE, Problem, did_you_mean, format_shape, variants

__all__ = ["bench"]


def bench(
    *,
    op: OpOption,
    shape: Annotated[list[str] | None, typer.Option(help="Shapes. By default the op's sweep.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Models whose shapes to run, instead of --shape.")] = None,
    tp: Annotated[
        int | None, typer.Option(min=2, help="Tensor parallelism of --model, the world size; by default all GPUs.")
    ] = None,
    tokens: TokensOption = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Dtypes. By default the models', else bfloat16.")] = None,
    world_size: Annotated[int | None, typer.Option(min=1, help="Ranks; by default all GPUs.")] = None,
    mode: Annotated[
        SweptMode | None, typer.Option(help="Inside CUDA graphs, outside, or both. Default: graph, eager on the host.")
    ] = None,
    input_kind: Annotated[SweptKind, typer.Option(help="Whether peers can address the input.")] = SweptKind.plain,
    layout: LayoutOption = None,
    scaling: ScalingOption = None,
    contender: Annotated[
        list[str] | None,
        typer.Option(help="Of tuned, library, the variants, cublas and the peers. By default all that run."),
    ] = None,
    peers: Annotated[
        list[str] | None,
        typer.Option(help="Adapters for other projects: a Python file, or a directory of some, as bench/peers is."),
    ] = None,
    link_gb_s: Annotated[
        float | None,
        typer.Option(min=1e-3, help="What one GPU sends to its peers at most, in 1e9 bytes/s. Known for H200."),
    ] = None,
    borrow: BorrowOption = None,
    csv: Annotated[Path | None, typer.Option(help="Append the rows to this CSV file.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Compare what dispatch runs with the variant `library` (NCCL, gloo on CPUs) and every other contender, in one run.

    Options with several values may be repeated or take them separated by commas.

    The contender cublas is the GEMM of a fused op alone. Fused GEMMs are timed with inputs that are not in the cache:
    launches take copies of them in turn. All other ops find them there, as what was just produced is.

    The results of --peers are compared with the reference before they are timed. A peer that is not installed, cannot
    run a problem or is wrong is left out, and stderr says why.

    Example: tunedcomm bench --op all_reduce --shape 4096,1048576 --csv results.csv

    Example: tunedcomm bench --op all_reduce --mode both --peers bench/peers

    Example: tunedcomm bench --op gemm_rs --shape 4096x8192x3584 --layout nk
    """
    spec = known_op(op)
    named = ModelOptions.of(model, tp=tp, tokens=tokens, shape=shape)
    ranks = local_ranks(named.ranks(world_size))
    on_gpu = num_gpus() >= 2
    modes = (mode or (SweptMode.graph if on_gpu else SweptMode.eager)).values
    dtypes = [check_dtype(name, spec) for name in split(dtype) or named.dtypes or ["bfloat16"]]
    shapes = list(named.shapes(spec.name, ranks)) or [check_shape(text, spec) for text in split(shape)]
    if not shapes:
        shapes = spec.default_shapes("cuda" if on_gpu else "host", ITEMSIZE[dtypes[0]])
    for extents in shapes:
        check_problem(Problem(spec.name, extents, dtypes[0], ranks))
    files = adapter_files(peers or [])
    if csv is not None:
        _check_csv(csv)
    job = {
        "op": spec.name,
        "shapes": [format_shape(extents) for extents in shapes],
        "dtypes": dtypes,
        "modes": list(modes),
        "input_kinds": list(input_kind.values),
        "layout": check_layout(layout, spec),
        "scalings": {name: check_scaling(scaling, spec, name) for name in dtypes},
        "contenders": _check_contenders(split(contender), spec.name, files) or None,
        "peers": [str(path) for path in files],
        "link_gb_s": link_gb_s,
        "csv": None if csv is None else str(csv.absolute()),
        "seed": seed,
        "run_id": secrets.token_hex(6),
        "command": shlex.join(["tunedcomm", *sys.argv[1:]]),
    }
    note(f"comparing {len(shapes)} shapes of {spec.name} on {ranks} ranks")
    found = _run(job, ranks, borrowed(borrow))
    print_left_out(found["left_out"], note)
    if as_json:
        emit_json(found["rows"])
    else:
        print_table(found["rows"])


def _check_csv(path: Path) -> None:
    """Refuse, before anything is measured, a file that cannot take the rows: of another program, or not writable."""
    from tunedcomm.report.bench_rows import NEEDED

    is_new = not path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+", newline="", encoding="utf-8") as file:
            file.seek(0)
            columns = next(reader(file), [])
        if is_new:
            path.unlink()
    except (OSError, UnicodeDecodeError, CsvError) as error:
        raise typer.BadParameter(f"{path} cannot be appended to: {error}", param_hint="--csv") from None
    if columns and (missing := [name for name in NEEDED if name not in columns]):
        raise typer.BadParameter(
            f"{path} is another program's table: it lacks the columns {', '.join(missing)}; name another file",
            param_hint="--csv",
        )


def _check_contenders(names: list[str], op: str, files: Sequence[Path]) -> list[str]:
    """Refuse as bad usage a contender that nothing is called; a few of an op that do not run here are left out."""
    from tunedcomm.cli import _gemm_alone
    from tunedcomm.cli._peers import TORCH_PEERS

    peers = [adapter.name for adapter in TORCH_PEERS] + [file.stem for file in files]
    known = ["tuned", *variants(op), _gemm_alone.NAME, *peers]
    for name in names:
        if name not in known:
            raise typer.BadParameter(
                f"{name!r} is no contender of {op}{did_you_mean(name, known)} They are {', '.join(known)}; "
                "--peers adds other projects' kernels",
                param_hint="--contender",
            )
    return names


def _run(job: Mapping[str, Any], world_size: int, borrow: Sequence[str]) -> dict[str, Any]:
    """What rank 0 writes, the rows and who was left out; leaves with code 1 if the gang failed."""
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
        found: dict[str, Any] = json.loads(result_file.read_text(encoding="utf-8"))
        return found
