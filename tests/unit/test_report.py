"""`tunedcomm report`: what it makes of databases, of trials that failed, and of CSV files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("plotly", reason="plotly is not installed (extra `report`)")
pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra `report`)")

import plotly.graph_objects
from report_samples import gemm_csv, recorded_database

from tunedcomm import kernels
from tunedcomm.cli import main
from tunedcomm.db.layers import named_layers
from tunedcomm.report.data import Material, best_by_shape, gather, group_up, read_csv
from tunedcomm.report.figures import curves, failure_panel, glance_panels, style_of, template
from tunedcomm.report.page import render
from tunedcomm.spec import ops, variants

RESULTS = Path(__file__).parents[2] / "bench" / "results"
ALL_REDUCE = RESULTS / "all_reduce_h200.csv"
RULES = RESULTS / "replay" / "regret_rules_h200.csv"


def invoke(*arguments: object) -> tuple[int, str]:
    shown = CliRunner().invoke(main.app, [str(argument) for argument in arguments])
    return shown.exit_code, shown.output


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded_database(tmp_path_factory.mktemp("report") / "swept.db")


@pytest.fixture(scope="module")
def everything(database: Path, tmp_path_factory: pytest.TempPathFactory) -> Material:
    gemms = gemm_csv(tmp_path_factory.mktemp("gemms") / "gemms.csv")
    return gather(named_layers(str(database)), [ALL_REDUCE, RULES, gemms])


def test_a_page_holds_every_number_in_tables_and_needs_nothing_else(everything: Material) -> None:
    page = render(everything, title="Two < three")
    assert "<title>Two &lt; three</title>" in page
    without_scripts = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    for rows in (*everything.bench.values(), *everything.stored.values()):
        for row in rows:
            assert f">{row.latency_p50_us:.2f}<" in without_scripts, row
    for heading in ("Benchmarks", "Fused GEMMs", "Tuned", "Regret", "Environment", "At a glance"):
        assert f"<h2>{heading}</h2>" in without_scripts
    page = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.findall(r'(?:src|href)="(?!#|data:)|@import|url\(', page), "it refers to something outside itself"
    anchors = re.findall(r'\bid="([^"]*)"', page)
    assert len(anchors) == len(set(anchors)), "an anchor stands twice"
    assert {link[1:] for link in re.findall(r'href="(#[^"]*)"', page)} <= set(anchors)


def test_what_is_chosen_is_what_dispatch_answers(database: Path, everything: Material) -> None:
    ours = [row for rows in everything.stored.values() for row in rows if row.is_chosen]
    shapes = {row.shape for rows in everything.stored.values() for row in rows}
    assert len(ours) == len(shapes)
    row = next(row for row in ours if row.shape == "512")
    code, output = invoke(
        *("lookup", "--op", "all_reduce", "--shape", "512", "--world-size", "4", "--hardware", "H200"),
        *("--db", database, "--json"),
    )
    assert code == 0, output
    assert json.loads(output[output.index("{") :])["variant"] == row.contender
    assert row.why


def test_of_several_runs_the_newest_counts_and_there_the_fastest(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(
        "op,shape,message_bytes,dtype,world_size,mode,contender,latency_p50_us,date\n"
        "all_reduce,512,1024,bfloat16,4,graph,kraken,3,2026-01-01\n"
        "all_reduce,512,1024,bfloat16,4,graph,kraken,7,2026-01-02\n"
        "all_reduce,512,1024,bfloat16,4,graph,kraken,5,2026-01-02\n"
        "all_reduce,512,1024,bfloat16,4,graph,library,10,2026-01-02\n",
        encoding="utf-8",
    )
    (rows,) = group_up(read_csv(path).rows).values()
    assert {row.contender: row.latency_p50_us for row in rows} == {"kraken": 5.0, "library": 10.0}
    assert {shape: row.over_library for shape, row in best_by_shape(rows).items()} == {"512": 2.0}


def test_reasons_of_failures_that_differ_by_numbers_are_counted_together(everything: Material) -> None:
    stored = everything.databases[0]
    panel = failure_panel(stored)
    rows = panel.tables[0].rows
    assert {row[3] for row in rows}.isdisjoint({"ok", "pruned", "infeasible"})
    assert f": {sum(trial.status == 'infeasible' for trial in stored.trials)}." in panel.note
    counts = [int(row[0]) for row in rows]
    assert sum(counts) == int(panel.title.split()[0])
    assert counts == sorted(counts, reverse=True)
    assert len({(*row[1:4], template(row[4])) for row in rows}) == len(rows), "one kind stands in two rows"
    together = next(row for row in rows if "registers" in row[4])
    assert int(together[0]) > 5
    assert not re.search(r"\d", together[4])


def test_problems_of_one_size_and_other_shapes_get_a_mark_each(tmp_path: Path) -> None:
    path = tmp_path / "experts.csv"
    shapes = ("1x7168x8x256", "16x7168x8x64", "16x7168x8x256")
    rows = [f"ep_dispatch,{shape},114688,bfloat16,4,graph,push,{us}" for us, shape in enumerate(shapes, 3)]
    path.write_text(
        "op,shape,message_bytes,dtype,world_size,mode,contender,latency_p50_us\n" + "\n".join(rows), encoding="utf-8"
    )
    ((group, found),) = group_up(read_csv(path).rows).items()
    (figure, *_) = curves(group, found, None)
    assert set(figure.data[0]["x"]) == set(figure.layout["xaxis"]["categoryarray"]) == set(shapes)
    assert figure.data[0]["mode"] == "markers"
    assert sorted(figure.data[0]["y"]) == [3, 4, 5]


def test_contenders_of_an_op_look_different_and_the_same_everywhere() -> None:
    kernels.discover()
    for op in ops():
        looks = [(style.colour, style.symbol) for style in map(style_of, variants(op))]
        assert len(set(looks)) == len(looks), op
    assert style_of("kraken").dash == "dot" != style_of("two_shot").dash


def test_the_note_of_a_database_says_that_the_library_copies(everything: Material) -> None:
    for groups, copies in ((everything.stored, True), (everything.bench, False)):
        found = [group for group in groups if group.op == "all_reduce" and not group.common.in_place]
        assert found
        assert {"copy" in group.library for group in found} == {copies}
    assert not any("copy" in group.library for group in everything.stored if group.common.in_place)
    assert not any("copy" in group.library for group in everything.stored if group.op == "all_gather")


def test_a_glance_draws_and_lists_every_group(everything: Material) -> None:
    (panel,) = glance_panels({**everything.bench, **everything.stored})
    (figure,), (table,) = panel.figures, panel.tables
    assert len(figure.data[0]["x"]) == len(table.rows) > 2
    for mean, error, row in zip(figure.data[0]["x"], figure.data[0]["error_x"]["array"], table.rows, strict=True):
        assert row[1] == f"{mean:.2f}×"
        assert row[3].startswith(f"{mean + error:.2f}×")
        assert max(map(len, row)) < 80
    plotly.graph_objects.Figure(figure.data, figure.layout)


@pytest.mark.parametrize(
    ("arguments", "token"),
    [
        ((), "CSV files"),
        (("--csv", ALL_REDUCE, "--op", "all_reduec"), "'all_reduec'"),
        (("--csv", RESULTS / "db" / "db_scale.csv"), "contender"),
    ],
)
def test_a_page_of_nothing_or_of_other_tables_is_bad_usage(
    arguments: tuple[object, ...], token: str, tmp_path: Path
) -> None:
    code, output = invoke("report", "--no-db", "-o", tmp_path / "r.html", *arguments)
    assert code == 2
    assert token in output
    assert not (tmp_path / "r.html").exists()


def test_a_file_without_rows_is_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.csv"
    empty.write_text(ALL_REDUCE.read_text(encoding="utf-8").splitlines()[0] + "\n", encoding="utf-8")
    code, output = invoke("report", "--no-db", "-o", tmp_path / "new" / "r.html", "--csv", empty)
    assert code == 0
    assert (tmp_path / "new" / "r.html").exists()
    assert "empty.csv: has no rows" in output


def test_a_shells_pattern_and_images(tmp_path: Path) -> None:
    """`--csv *.csv` comes as one value and more arguments."""
    gemms = gemm_csv(tmp_path / "gemms.csv")
    code, output = invoke(
        *("report", "--no-db", "-o", tmp_path / "r.html", "--png", tmp_path / "png", "--json", "--csv", gemms),
        *(RESULTS / "bound_cost_h200.csv", RULES),
    )
    assert code == 0, output
    answer = json.loads(output)
    images = [Path(image) for image in answer["images"]]
    assert answer["num_groups"] == 2
    for name, least in (("speedup", 1), ("latency", 1), ("dark", len(images) / 2)):
        assert sum(name in image.name for image in images) >= least
    for image in images:
        assert image.read_bytes().startswith(b"\x89PNG")
        assert image.stat().st_size > 10_000
