"""`tunedcomm report`: a page of figures from databases and benchmarks, in one file that needs no network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunedcomm.cli.options import EverywhereOption, JsonOption, LinkOption, OnlyOpOption, bad_usage
from tunedcomm.cli.output import note, show
from tunedcomm.cli.stored import read_layers, wanted_hardware
from tunedcomm.metrics import format_bytes, plural

if TYPE_CHECKING:
    from tunedcomm.report.data import Material


def report(
    *,
    more: Annotated[list[Path] | None, typer.Argument(metavar="[CSV]...", help="More CSV files.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path("report.html"),
    db: Annotated[list[str] | None, typer.Option(help="Databases to show; by default this machine's rows.")] = None,
    everything: EverywhereOption = False,
    no_db: Annotated[bool, typer.Option("--no-db", help="Show no database, only CSV files.")] = False,
    csv: Annotated[list[Path] | None, typer.Option(help="CSV file of `tunedcomm bench`; may be repeated.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write every figure as an image into this directory, too.")] = None,
    op: OnlyOpOption = None,
    link_gb_s: LinkOption = None,
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "tunedcomm report",
    as_json: JsonOption = False,
) -> None:
    """Draw latency, bandwidth, speed-ups, failures and regret. Needs tunedcomm[report].

    Example: tunedcomm report -o report.html --db cluster.db --csv bench/results/*.csv
    """
    from tunedcomm.report.data import gather
    from tunedcomm.report.images import write_images
    from tunedcomm.report.page import need, render

    need("plotly")
    if png is not None:
        need("matplotlib")
    if no_db and db:
        raise bad_usage("--no-db", "leave it out, or --db")
    files = [*(csv or []), *(more or [])]
    if no_db and not files:
        raise bad_usage("--no-db", "a page needs a database or CSV files; name some")
    layers = [] if no_db else [layer for target in db or (None,) for layer in read_layers(target)]
    try:
        is_wanted = wanted_hardware(None, everything=everything or bool(db) or no_db)
        material = gather(layers, files, op=op, is_wanted=is_wanted, link_gb_s=link_gb_s)
    except ValueError as error:
        raise bad_usage("--csv", str(error)) from error
    _note_gaps(material)
    if op is not None and not (material.bench or material.stored):
        raise bad_usage("--op", f"nothing of {op!r} is in the databases and files given")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(render(material, title=title), encoding="utf-8")
    except OSError as error:
        raise bad_usage("--output", f"{output} cannot be written: {error.strerror}") from error
    try:
        images = [] if png is None else write_images(material, png)
    except OSError as error:
        raise bad_usage("--png", f"{png} cannot take images: {error.strerror}") from error
    size, num_groups = output.stat().st_size, len(material.bench) + len(material.stored)
    value = {"output": output, "num_bytes": size, "num_groups": num_groups, "images": images}
    text = [f"{output}: {plural(num_groups, 'group')} of problems, {format_bytes(size)}", *map(str, images)]
    show(value, text, as_json=as_json)


def _note_gaps(material: Material) -> None:
    """Note CSV files without rows and invalid lines."""
    for file in material.files:
        if not (file.rows or file.rules or file.skipped):
            note(f"{file.name}: has no rows")
        if file.skipped:
            note(f"{file.name}: left out {plural(len(file.skipped), 'invalid line')}; the page lists them")
