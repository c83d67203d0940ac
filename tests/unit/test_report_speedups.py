"""The speed-ups of a report: those that dispatch goes by, in tables from which a reader can make them again."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("plotly", reason="plotly is not installed (extra `report`)")

from report_samples import gemm_csv, stored_trials

from tunedcomm.cli import main
from tunedcomm.db.layers import named_layers
from tunedcomm.db.store import Database
from tunedcomm.report.data import Group, Measured, gather, group_up, read_csv
from tunedcomm.report.figures import rows_table
from tunedcomm.report.page import render

SHIPPED = Path(__file__).parents[2] / "tuning_db" / "h200-nvswitch18-x4.db"
# Variant to its µs and the library's in its run. Of lamport's the library's is far above the median, 12.25.
TIMES = {"library": (10.0, 10.0), "one_shot": (6.0, 14.0), "two_shot": (5.0, 10.5), "lamport": (6.5, 70.0)}


def shown(path: Path) -> dict[str, Measured]:
    (rows,) = gather(named_layers(str(path)), []).stored.values()
    return {row.contender: row for row in rows}


def test_speedups_are_those_of_dispatch(tmp_path: Path) -> None:
    rows = shown(stored_trials(tmp_path / "t.db", TIMES))
    found = CliRunner().invoke(
        main.app,
        f"lookup --op all_reduce --shape 512 --world-size 4 --hardware H200 --json --db {tmp_path / 't.db'}".split(),
    )
    answer = json.loads(found.output[found.output.index("{") :])
    (chosen,) = (row for row in rows.values() if row.is_chosen)
    assert chosen.contender == answer["variant"] == "one_shot", "by its ratio, though two_shot took fewer µs"
    assert chosen.over_library == pytest.approx(answer["library_us"] / answer["latency_us"])
    assert {name: row.over_library for name, row in rows.items()} == pytest.approx(
        {"library": 1.0, "one_shot": 14 / 6, "two_shot": 2.1, "lamport": 12.25 / 6.5}
    )


def test_eager_speedups_are_those_of_dispatch_too(tmp_path: Path) -> None:
    """Where the library's time counts by half, the root of its product with the median, 12.25, is set against a row."""
    path = stored_trials(tmp_path / "t.db", TIMES, mode="eager")
    rows = shown(path)
    against = {
        "library": 10.0,
        "one_shot": math.sqrt(14 * 12.25),
        "two_shot": math.sqrt(10.5 * 12.25),
        "lamport": 12.25,
    }
    assert {name: row.over_library for name, row in rows.items()} == pytest.approx(
        {name: us / TIMES[name][0] for name, us in against.items()}
    )
    (chosen,) = (row for row in rows.values() if row.is_chosen)
    said = re.search(r"([\d.]+)x as fast as the library", chosen.why)
    assert said is not None
    assert chosen.over_library == pytest.approx(float(said[1]), abs=0.006)
    ((group, found),) = gather(named_layers(str(path)), []).stored.items()
    cells = {row[2].removesuffix(" ★"): row[6] for row in rows_table(group, found, None).rows}
    assert cells["two_shot"] == "10.50 † 11.34"


def test_of_a_variants_configs_the_one_is_shown_that_dispatch_takes_for_the_fastest(tmp_path: Path) -> None:
    path = stored_trials(tmp_path / "t.db", {"library": (10.0, 10.0), "one_shot": (3.0, 10.0), "two_shot": (5.0, 10.0)})
    with Database.open(path) as database:
        like = next(trial for trial in database.trials() if trial.variant == "two_shot")
        warps = 4 if like.config["num_warps"] != 4 else 8
        slow_run = replace(like, config={**like.config, "num_warps": warps}, latency_p50_us=5.5, baseline_p50_us=12.0)
        database.record([replace(slow_run, latency_p10_us=5.5, latency_p90_us=5.5, id=None)])
    row = shown(path)["two_shot"]
    assert not row.is_chosen
    assert row.latency_p50_us == 5.5, "12 / 5.5 is more than 10 / 5"
    assert row.over_library == pytest.approx(12 / 5.5)


def test_the_shipped_databases_speedups_are_those_of_dispatch() -> None:
    compared = 0
    for rows in gather(named_layers(str(SHIPPED)), [], op="all_to_all").stored.values():
        for row in rows:
            if row.is_chosen and (said := re.search(r"([\d.]+)x as fast as the library", row.why)):
                assert row.over_library == pytest.approx(float(said[1]), abs=0.006), row
                compared += 1
    assert compared >= 8


def test_a_row_says_what_its_speedup_is_made_of(tmp_path: Path) -> None:
    path = stored_trials(tmp_path / "t.db", TIMES)
    ((group, rows),) = gather(named_layers(str(path)), []).stored.items()
    table = rows_table(group, rows, None)
    own, library, ratio = (table.columns.index(name) for name in ("p50 µs", "library in that run µs", "vs library"))
    cells = {row[2].removesuffix(" ★"): (row[own], row[library], row[ratio]) for row in table.rows}
    assert cells == {
        "library": ("10.00", "10.00", "1.00×"),
        "one_shot": ("6.00", "14.00", "2.33×"),
        "two_shot": ("5.00", "10.50", "2.10×"),
        "lamport": ("6.50", "70.00 † 12.25", "1.88×"),
    }
    page = re.sub(r"<script.*?</script>", "", render(gather(named_layers(str(path)), [])), flags=re.DOTALL)
    assert "vs library is the library&#x27;s time in the row&#x27;s own run over the row&#x27;s p50" in page


def test_a_speedup_over_a_throttled_library_is_marked_on_the_page(tmp_path: Path) -> None:
    """Half of the rows were measured on a throttled host: dispatch goes by the ratio, and the page warns of it."""
    times = {"library": (10.0, 10.0), "one_shot": (6.0, 24.0), "two_shot": (5.0, 10.0), "lamport": (6.2, 24.0)}
    path = stored_trials(tmp_path / "t.db", times)
    rows = shown(path)
    assert {name for name, row in rows.items() if row.is_unsteady} == {"one_shot", "lamport"}
    page = re.sub(r"<script.*?</script>", "", render(gather(named_layers(str(path)), [])), flags=re.DOTALL)
    glance = page[page.index('id="glance"') : page.index("</section>")]
    assert ">4.00× ‡<" in glance
    assert "uncertain" in glance
    calm = render(gather(named_layers(str(stored_trials(tmp_path / "calm.db", TIMES))), []))
    assert "‡" not in calm[calm.index('id="glance"') : calm.index("</section>")]


def test_of_several_runs_each_row_is_compared_with_the_library_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(
        "op,shape,message_bytes,dtype,world_size,mode,contender,latency_p50_us,date,run_id\n"
        "all_reduce,512,1024,bfloat16,4,graph,kraken,4,2026-01-01,a\n"
        "all_reduce,512,1024,bfloat16,4,graph,library,12,2026-01-01,a\n"
        "all_reduce,512,1024,bfloat16,4,graph,tuned,5,2026-01-02,b\n"
        "all_reduce,512,1024,bfloat16,4,graph,library,10,2026-01-02,b\n"
        "all_reduce,512,1024,bfloat16,4,graph,nccl_tests,5,2026-01-03,c\n",
        encoding="utf-8",
    )
    (rows,) = group_up(read_csv(path).rows).values()
    assert {row.contender: row.over_library for row in rows} == {
        "kraken": 3.0,
        "library": 1.0,
        "tuned": 2.0,
        "nccl_tests": None,
    }


def test_the_page_says_what_the_library_is(tmp_path: Path) -> None:
    group = Group(origin="o", op="all_reduce", world_size=4, dtype="bfloat16", mode="graph", fabric="nvswitch-18")
    named = {op: replace(group, op=op).library for op in ("all_reduce", "all_reduce_rms_norm", "gemm_rs", "another")}
    assert named == {
        "all_reduce": "NCCL",
        "all_reduce_rms_norm": "NCCL, then PyTorch operators, not compiled",
        "gemm_rs": "cuBLAS and NCCL",
        "another": "the library",
    }
    assert replace(group, op="ag_gemm", fabric="host").library == "PyTorch and gloo"
    page = render(gather([], [gemm_csv(tmp_path / "g.csv")]))
    assert "<td>cuBLAS and NCCL</td>" in page[page.index('id="glance"') : page.index("</section>")]
    assert "over cuBLAS and NCCL" in page[page.index('id="gemms"') :]


def test_ops_come_in_the_order_in_which_people_look_for_them() -> None:
    group = Group(origin="z", op="", world_size=4, dtype="bfloat16", mode="graph")
    row = Measured(group=group, shape="512", message_bytes=1024, contender="library", latency_p50_us=1.0)
    ops = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_reduce_rms_norm", "all_reduce_bias"]
    ops += ["another", "ag_gemm", "gemm_ar", "gemm_rs"]
    rows = [replace(row, group=replace(group, op=op, origin=f"{i}.csv")) for i, op in enumerate(reversed(ops))]
    assert [group.op for group in group_up(rows)] == ops
