"""Write the tables of the pages, and the README's plot, from bench/results: `python docs/measured.py`.

A table stands between `<!-- begin generated NAME -->` and `<!-- end generated NAME -->`; NAME is a key of TABLES.
The plot needs tunedcomm[report]; its points are in the image as text, too, which a test compares with the results.
"""

from __future__ import annotations

import csv
import functools
import json
import re
import shlex
import struct
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
Row = dict[str, str]
Run = dict[str, Row]
KIB, MIB = 1 << 10, 1 << 20


@functools.cache
def rows(name: str) -> tuple[Row, ...]:
    """All rows of a file of bench/results."""
    with (RESULTS / name).open(newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


def only(name: str, **wanted: str) -> Row:
    """The one row that has these values."""
    found = [row for row in rows(name) if all(row[column] == value for column, value in wanted.items())]
    if len(found) != 1:
        raise ValueError(f"{len(found)} rows of {name} have {wanted}; there must be one")
    return found[0]


@functools.cache
def runs(name: str, op: str, world_size: int, mode: str = "graph") -> dict[int, list[Run]]:
    """Message size to the runs that measured it in bf16 on plain inputs, contender to row, newest first."""
    found: dict[int, dict[str, Run]] = defaultdict(lambda: defaultdict(dict))
    for row in rows(name):
        kind = (row["op"], row["world_size"], row["mode"], row["dtype"], row["input_kind"], row["in_place"])
        if kind == (op, str(world_size), mode, "bfloat16", "plain", "False"):
            found[int(row["message_bytes"])][row["run_id"]][row["contender"]] = row
    return {
        size: sorted(by_run.values(), key=lambda run: max(row["date"] for row in run.values()), reverse=True)
        for size, by_run in sorted(found.items())
    }


def newest(name: str, op: str, world_size: int, mode: str = "graph", *, needs: str = "tuned") -> dict[int, Run]:
    """Message size to the newest run that has dispatch's choice, the library and `needs`."""
    found = {}
    for size, held in runs(name, op, world_size, mode).items():
        complete = [run for run in held if {"tuned", "library", needs} <= set(run)]
        if complete:
            found[size] = complete[0]
    return found


def by_shape(name: str, op: str, world_size: int, dtype: str = "bfloat16") -> dict[str, Run]:
    """Shape to the newest run in graphs that has dispatch's choice, contender to row, in the file's order."""
    found: dict[str, dict[str, Run]] = defaultdict(lambda: defaultdict(dict))
    for row in rows(name):
        if (row["op"], row["world_size"], row["mode"], row["dtype"]) == (op, str(world_size), "graph", dtype):
            found[row["shape"]][row["run_id"]][row["contender"]] = row
    complete = {shape: [run for run in held.values() if "tuned" in run] for shape, held in found.items()}
    return {shape: max(held, key=lambda run: run["tuned"]["date"]) for shape, held in complete.items() if held}


def p50(run: Run, contender: str) -> float:
    """Median of a contender in µs."""
    return float(run[contender]["latency_p50_us"])


def us(run: Run, contender: str) -> str:
    """Median of a contender in µs, a dash where it did not run."""
    return f"{p50(run, contender):.2f}" if contender in run else "–"


def size_text(size: int) -> str:
    """Bytes in KiB or MiB."""
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def short(value: float | str) -> str:
    """Two or more digits: 1.7, 29, 131."""
    number = float(value)
    return f"{number:.1f}".removesuffix(".0") if number < 10 else f"{number:.0f}"


def count(value: int | str) -> str:
    """With commas."""
    return f"{int(value):,}"


def table(heads: dict[str, str], lines: list[list[str]]) -> str:
    """Markdown; heads to how their columns are aligned: l or r."""
    rule = "".join("---:|" if side == "r" else "---|" for side in heads.values())
    text = [f"| {' | '.join(heads)} |", f"|{rule}"]
    return "\n".join([*text, *(f"| {' | '.join(line)} |" for line in lines)])


ALL_REDUCE, COLLECTIVES, GEMMS = "all_reduce_h200.csv", "collectives_h200.csv", "gemm_h200.csv"
TORCH = ("torch_one_shot_symmetric", "torch_two_shot_symmetric")
_PEERS = {
    "library": "NCCL",
    TORCH[0]: "torch one-shot",
    TORCH[1]: "torch two-shot",
    "kraken": "Kraken",
}


def all_reduce(world_size: int, mode: str = "graph") -> str:
    """Medians by size, from the newest run with PyTorch's operators; Kraken's from the newest that has it."""
    lines = []
    found = newest(ALL_REDUCE, "all_reduce", world_size, mode, needs=TORCH[1])
    held = runs(ALL_REDUCE, "all_reduce", world_size, mode)
    kraken = {size: next((run for run in held[size] if "kraken" in run), {}) for size in found}
    peers = {name: head for name, head in _PEERS.items() if name != "kraken" or any(kraken.values())}
    for size, run in found.items():
        cells = [us({**kraken[size], **run} if name == "kraken" else run, name) for name in peers]
        lines.append([size_text(size), *cells, us(run, "tuned"), f"`{run['tuned']['config']}`"])
    numbers = dict.fromkeys([*peers.values(), "tunedcomm"], "r")
    return table({"message": "l", **numbers, "what ran": "l"}, lines)


def collectives(world_size: int) -> str:
    """NCCL and ours by size, with the ratio."""
    ops = ("all_gather", "reduce_scatter", "all_to_all")
    found = {op: newest(COLLECTIVES, op, world_size) for op in ops}
    lines = []
    for size in sorted({size for held in found.values() for size in held}):
        cells = []
        for op in ops:
            run = found[op].get(size)
            ours = f"{us(run, 'tuned')} ({p50(run, 'library') / p50(run, 'tuned'):.2f})" if run else "–"
            cells += [us(run, "library") if run else "–", ours]
        lines.append([size_text(size), *cells])
    heads = {f"{op}: NCCL": "r" for op in ops}
    pairs = {name: side for head, side in heads.items() for name, side in ((head, side), (f"{head[:-6]}: tuned", side))}
    return table({"size": "l", **pairs}, lines)


def norm(world_size: int) -> str:
    """The sum with residual and norm, by tokens of hidden size 8192."""
    lines = []
    held = newest(COLLECTIVES, "all_reduce_rms_norm", world_size, needs="nccl_compiled_norm")
    for run in held.values():
        ratio = p50(run, "nccl_compiled_norm") / p50(run, "tuned")
        tokens = run["tuned"]["shape"].partition("x")[0]
        variant = run["tuned"]["config"].partition("(")[0]
        ours = f"{us(run, 'tuned')} ({ratio:.2f})"
        lines.append([tokens, us(run, "library"), us(run, "nccl_compiled_norm"), ours, f"`{variant}`"])
    heads = {"tokens": "r", "NCCL, eager norm": "r", "NCCL, compiled norm": "r", "tuned": "r", "variant": "l"}
    return table(heads, lines)


def gemms(world_size: int) -> str:
    """The fused GEMMs by shape, beside the GEMM alone."""
    lines = []
    for op in ("gemm_rs", "ag_gemm", "gemm_ar"):
        for shape, run in by_shape(GEMMS, op, world_size).items():
            cells = [us(run, name) for name in ("cublas", "library", "torch_fused", "tuned")]
            over, faster = p50(run, "tuned") / p50(run, "cublas"), p50(run, "library") / p50(run, "tuned")
            variant = run["tuned"]["config"].partition("(")[0]
            lines.append([f"`{op}`", shape, *cells, f"{over:.2f}", f"{faster:.2f}", f"`{variant}`"])
    numbers = ("cuBLAS alone", "cuBLAS + NCCL", "torch fused", "tuned", "over cuBLAS alone", "NCCL over tuned")
    return table({"op": "l", "M x N x K": "l", **dict.fromkeys(numbers, "r"), "variant": "l"}, lines)


def host_costs() -> list[dict[str, str]]:
    """Runs of bench/eager_cost.py in their order: what each part cost in µs, with `world_size` and `date`."""
    found: dict[str, dict[str, str]] = {}
    for row in rows("eager_cost_h200.csv"):
        run = found.setdefault(row["run_id"], {"world_size": row["world_size"], "date": row["date"]})
        run[row["contender"].removeprefix("host_cost:")] = row["latency_p50_us"]
    return list(found.values())


def eager_cost() -> str:
    """What an eager call costs the host, run by run."""
    parts = {"tuned": "`all_reduce(x)`", "tuned_out": "with `out=`", "launch": "launch alone"}
    parts |= {"torch_one_shot": "torch one-shot", "library": "NCCL"}
    lines = []
    for number, run in enumerate(host_costs(), 1):
        cells = [f"{float(run[name]):.2f}" for name in parts]
        ratio = float(run["tuned"]) / float(run["torch_one_shot"])
        lines.append([str(number), run["world_size"], run["date"][:10], *cells, f"{ratio:.2f}"])
    numbers = dict.fromkeys([*parts.values(), "to torch one-shot"], "r")
    return table({"run": "r", "GPUs": "r", "date": "l", **numbers}, lines)


def bound_cost() -> str:
    """Kernels with and without the bound of their waits."""
    sizes = {"4096": "4 KiB", "65536": "64 KiB"}
    names = dict.fromkeys(row["contender"].partition(":")[0] for row in rows("bound_cost_h200.csv"))
    lines = []
    for name in names:
        cells = []
        for size in sizes:
            for build in ("bounded", "unbounded"):
                row = only("bound_cost_h200.csv", message_bytes=size, contender=f"{name}:{build}")
                cells.append(f"{float(row['latency_p50_us']):.2f}")
        lines.append([f"`{name}`", *cells])
    heads = {f"{text} {build}": "r" for text in sizes.values() for build in ("with", "without")}
    return table({"variant": "l", **heads}, lines)


def sweeps() -> str:
    """Sweeps of `tunedcomm tune`, by the options of their command."""
    lines = []
    for row in rows("tuner/sweeps_h200.csv"):
        words = shlex.split(row["command"])[2:]
        pairs = [pair for pair in pairwise(words) if pair[0].startswith("--")]
        if "bench/regret.py" in row["command"]:
            pairs = [("--shape", "(40 odd sizes)") if pair[0] == "--shape" else pair for pair in pairs]
        options = " ".join(f"{name} {value}" for name, value in pairs if name not in ("--op", "--db", "--world-size"))
        lines.append(
            [
                row["world_size"],
                f"`{options}`" if options else "none",
                row["gangs"],
                row["triton_cache"],
                count(row["trials"]),
                row["seconds"],
                count(row["trials_per_minute"]),
                row["num_compiled"],
                f"{100 * float(row['bind_share']):.1f} %",
            ]
        )
    heads = {"GPUs": "r", "options": "l", "gangs": "r", "Triton cache": "l", "trials": "r", "seconds": "r"}
    heads |= {"trials a minute": "r", "had to compile": "r", "binding": "r"}
    return table(heads, lines)


_RULES = {
    "dispatch": "`dispatch`: bounds from both sizes, and who needs one round alone",
    "rounds unknown": "the same without what variants say of their rounds",
    "line, every trial": "straight lines between both sizes, every trial",
    "nearest": "winner of the nearest size",
    "larger": "winner of the next larger size",
    "smaller": "winner of the next smaller size",
    "line, finals": "straight lines, finals only",
    "library": "always the library",
}


def regret_rules() -> str:
    """Regret of rules of selection on 4 and 2 GPUs."""
    lines = []
    for rule, text in _RULES.items():
        cells = []
        for world_size in ("4", "2"):
            row = only("replay/regret_rules_h200.csv", world_size=world_size, rule=rule)
            cells += [f"{float(row[name]):.3f}" for name in ("regret_mean", "regret_worst")]
        lines.append([text, *cells])
    heads = {"rule": "l", "4 GPUs, mean": "r", "4 GPUs, worst": "r", "2 GPUs, mean": "r", "2 GPUs, worst": "r"}
    return table(heads, lines)


def scale_replay() -> str:
    """Workers that share a PostgreSQL."""
    lines = []
    for row in rows("replay/scale_replay.csv"):
        killed = int(row["killed"])
        lines.append(
            [
                row["workers"] + (f", of which {killed} killed" if killed else ""),
                count(row["trials"]),
                row["problems"],
                short(row["trials_per_s"]),
                row["ideal_per_s"],
                f"{short(row['claim_ms_p50'])} / {short(row['claim_ms_p90'])} ms",
                f"{short(row['record_ms_p50'])} ms",
                count(row["refused"]),
                f"{short(row['worker_cpu_ms'])} / {short(row['server_cpu_ms'])} ms",
                row["max_connections"],
                row["lost"],
                row["doubled"],
            ]
        )
    names = ("workers", "trials", "problems", "trials/s", "if sharing cost nothing", "claim p50 / p90", "record p50")
    names += ("refused claims", "processor time a trial: worker / server", "sessions", "lost", "doubled")
    return table(dict.fromkeys(names, "r"), lines)


NODES, GANGS_A_NODE, HEARTBEAT_S, SESSIONS = 1000, 2, 20, (2, 3)
RATES = (400, 120)  # trials a minute of a gang with a warm and with a cold Triton cache


def thousand_nodes() -> str:
    """What many nodes ask of one server, from the rows of scale_replay.csv that had no queue."""
    quiet = only("replay/scale_replay.csv", workers="16", killed="0")
    largest = only("replay/scale_replay.csv", workers="64", trials="20000")
    gangs = NODES * GANGS_A_NODE
    server_ms, worker_ms = float(quiet["server_cpu_ms"]), float(quiet["worker_cpu_ms"])
    stored = float(largest["database_mib"]) + float(largest["studies_mib"])
    rates = [gangs * rate / 60 for rate in RATES]

    def rounded(value: float) -> str:
        return f"{round(value, -2):,.0f}" if value < 20000 else f"{round(value, -3):,.0f}"

    def both(numbers: list[float], text: Callable[[float], str]) -> list[str]:
        return [text(number) for number in numbers]

    share = [100 * rate / NODES * worker_ms / 1000 for rate in rates]
    hourly = [rate * 3600 * stored / float(largest["trials"]) / 1024 for rate in rates]
    sessions = f"{NODES * SESSIONS[0]:,}–{NODES * SESSIONS[1]:,}"
    worked = " and ".join(f"{gangs:,} × {rate} / 60" for rate in RATES)
    space = f"trials × ({largest['database_mib']} + {largest['studies_mib']} MiB) / {count(largest['trials'])}"
    beats = short(NODES / HEARTBEAT_S)
    lines = [
        ["trials a second", worked, *both(rates, rounded)],
        [
            "server processors",
            f"trials/s × {server_ms:.2f} ms (16 workers, no queue)",
            *both([rate * server_ms / 1000 for rate in rates], lambda x: f"{x:.0f}"),
        ],
        [
            "commits a second that wait for the disk",
            "3 a trial: claim, record, tell",
            *both([3 * rate for rate in rates], rounded),
        ],
        ["heartbeats a second", f"{NODES:,} / {HEARTBEAT_S} s", beats, beats],
        ["sessions", "2 a supervisor and now and then a third", sessions, sessions],
        ["space an hour", space, *both(hourly, lambda x: f"{x:.0f} GiB")],
        [
            "a supervisor's processor time",
            f"{rates[0] / NODES:.1f} or {rates[1] / NODES:.0f} trials/s × {worker_ms:.1f} ms",
            *both(share, lambda x: f"{x:.0f} % of one"),
        ],
    ]
    return table({"resource": "l", "arithmetic": "l", "warm": "r", "cold": "r"}, lines)


_SERVES = {
    4: "4 ranks: `all_reduce`, bf16 and fp16, graph and eager, and bf16 in graphs in place; bf16 in graphs: "
    "`all_gather`, `reduce_scatter`, `all_to_all`, `all_reduce_bias`, `all_reduce_rms_norm`; at some shapes "
    "`gemm_rs`, `ag_gemm`, `gemm_ar`",
    2: "2 ranks: the same, of the GEMMs those of Llama 3 70B with 1 to 4096 tokens",
}


def shipped() -> str:
    """The files of tuning_db, from their manifests."""
    lines = []
    for world_size, serves in _SERVES.items():
        path = ROOT / "tuning_db" / f"h200-nvswitch18-x{world_size}.db"
        manifest = json.loads(path.with_name(f"{path.name}.manifest.json").read_text(encoding="utf-8"))
        trials = count(manifest["rows"]["trials"])
        lines.append([f"`{path.name}`", serves, trials, f"`{manifest['sha256'][:16]}`"])
    return table({"file": "l", "serves": "l", "trials": "r", "SHA-256 begins": "l"}, lines)


def all_reduce_large() -> str:
    """all_reduce from 64 MiB on, every run with dispatch's choice."""
    lines = []
    for size in (64 * MIB, 128 * MIB, 256 * MIB):
        for run in reversed(runs(COLLECTIVES, "all_reduce", 4)[size]):
            ratio = p50(run, "library") / p50(run, "tuned")
            lines.append([size_text(size), us(run, "library"), us(run, "tuned"), f"{ratio:.2f}"])
    return table({"message": "l", "NCCL, in place": "r", "tunedcomm, out of place": "r", "ratio": "r"}, lines)


LLAMA = "model/llama_tp_x2_h200.csv"
PYTORCH = ("library_eager", "library_compiled", "async_tp_compiled")
OURS = ("intercept_eager", "intercept_compiled", "fusion_compiled")


def newest_of_each(name: str) -> dict[str, dict[str, Row]]:
    """Workload to its newest run, configuration to row."""
    found: dict[str, dict[str, Row]] = {}
    for row in sorted(rows(name), key=lambda row: row["date"]):
        held = found.setdefault(row["workload"], {})
        if any(other["run_id"] != row["run_id"] for other in held.values()):
            held.clear()
        held[row["configuration"]] = row
    return found


def best_us(run: dict[str, Row], names: tuple[str, ...]) -> float:
    """µs a layer of the fastest of these configurations."""
    return min(float(run[name]["us_per_layer"]) for name in names if name in run and run[name]["status"] == "ok")


def llama() -> str:
    """µs a layer by workload and configuration, and what the best of ours gains."""
    lines = []
    for workload, run in newest_of_each(LLAMA).items():
        cells = []
        for name in (*PYTORCH, *OURS):
            ran = name in run and run[name]["status"] == "ok"
            cells.append(f"{float(run[name]['us_per_layer']):.1f}" if ran else "–")
        lines.append([f"`{workload}`", *cells, f"{best_us(run, PYTORCH) / best_us(run, OURS):.3f}"])
    heads = [f"`{name}`" for name in (*PYTORCH, *OURS)]
    return table({"workload": "l", **dict.fromkeys(heads, "r"), "gain": "r"}, lines)


def intercept_cost() -> str:
    """What a call that is not served costs outside of interception and inside, in the newest run."""
    found = rows("model/intercept_cost_h200.csv")
    last = max(found, key=lambda row: row["date"])["run_id"]
    lines = [
        [row["call"], f"{float(row['outside_us']):.1f}", f"{float(row['inside_us']):.1f}"]
        for row in found
        if row["run_id"] == last
    ]
    return table({"call": "l", "outside, µs": "r", "inside, µs": "r"}, lines)


def stress() -> str:
    """How often the variants of every op were launched, on how many ranks and GPUs, and how many results were wrong."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows("stress/stress_h200.csv"):
        if int(row["launches"]):
            groups.setdefault((row["op"], row["world_size"], row["gpus"], row["launches"]), []).append(row)
    lines = []
    for (op, ranks, gpus, launches), held in sorted(groups.items()):
        names = ", ".join(f"`{row['variant']}`" for row in held)
        lines.append([f"`{op}`", names, ranks, gpus, count(launches), str(sum(int(row["wrong"]) for row in held))])
    return table({"op": "l", "variants": "l", "ranks": "r", "GPUs": "r", "launches of each": "r", "wrong": "r"}, lines)


TABLES: dict[str, Callable[[], str]] = {
    "all_reduce, 4 GPUs, graph": lambda: all_reduce(4),
    "all_reduce, 2 GPUs, graph": lambda: all_reduce(2),
    "all_reduce, 4 GPUs, eager": lambda: all_reduce(4, "eager"),
    "all_reduce, large": all_reduce_large,
    "eager cost": eager_cost,
    "collectives, 4 GPUs": lambda: collectives(4),
    "collectives, 2 GPUs": lambda: collectives(2),
    "norm, 4 GPUs": lambda: norm(4),
    "norm, 2 GPUs": lambda: norm(2),
    "gemms, 4 GPUs": lambda: gemms(4),
    "bound cost": bound_cost,
    "llama, 2 GPUs": llama,
    "interception": intercept_cost,
    "stress": stress,
    "sweeps": sweeps,
    "regret rules": regret_rules,
    "scale replay": scale_replay,
    "1,000 nodes": thousand_nodes,
    "shipped": shipped,
}


PLOT = Path(__file__).with_name("all_reduce_h200.png")
WORLD_SIZE = 4
_GROUND, _TEXT, _GRID = "#ffffff", "#1a2230", "#e3e7ed"
# Curve to colour, marker and width.
_LOOKS = {
    "NCCL": ("#8a94a6", "o", 2.0),
    "PyTorch's operators, the best": ("#2f86d6", "s", 2.0),
    "Kraken": ("#00a37a", "D", 2.0),
    "tunedcomm": ("#e05a2b", "*", 3.0),
}
Points = list[list[float]]


def points() -> dict[str, Points]:
    """Curve to [bytes, µs, speed-up over NCCL in the same run]."""
    found: dict[str, Points] = {name: [] for name in _LOOKS}

    def add(curve: str, size: int, run: Run, us: float) -> None:
        found[curve].append([size, us, round(p50(run, "library") / us, 3)])

    for size, run in newest(ALL_REDUCE, "all_reduce", WORLD_SIZE, needs=TORCH[1]).items():
        add("NCCL", size, run, p50(run, "library"))
        add("PyTorch's operators, the best", size, run, min(p50(run, name) for name in TORCH if name in run))
        add("tunedcomm", size, run, p50(run, "tuned"))
    for size, held in runs(ALL_REDUCE, "all_reduce", WORLD_SIZE).items():
        measured = next((run for run in held if {"kraken", "library"} <= set(run)), None)
        if measured is not None:
            add("Kraken", size, measured, p50(measured, "kraken"))
    return {curve: held for curve, held in found.items() if held}


def text_of(path: Path, key: str) -> str:
    """What a PNG says under `key`.

    Raises:
        KeyError: nothing.
    """
    data, at = path.read_bytes(), 8
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        name, _, value = data[at + 8 : at + 8 + length].partition(b"\0")
        if kind == b"tEXt" and name.decode("latin-1") == key:
            return value.decode("latin-1")
        at += 12 + length
    raise KeyError(key)


def _panel(axes: Any, curves: dict[str, Points], column: int, title: str) -> None:
    for curve, held in curves.items():
        colour, mark, width = _LOOKS[curve]
        sizes, values = [point[0] for point in held], [point[column] for point in held]
        axes.plot(sizes, values, color=colour, marker=mark, linewidth=width, markersize=3 + 2 * width, label=curve)
    ticks = [1 << power for power in range(10, 29, 3)]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [size_text(tick) for tick in ticks])
    axes.set_title(title, color=_TEXT, fontsize=11, loc="left")
    axes.set_facecolor(_GROUND)
    axes.tick_params(colors=_TEXT, labelsize=9)
    axes.grid(True, color=_GRID, linewidth=0.8)
    for spine in axes.spines.values():
        spine.set_color(_GRID)


def draw(path: Path) -> None:
    """Write the image."""
    from matplotlib.figure import Figure

    curves = points()
    figure = Figure(figsize=(10.4, 4.2), dpi=110, facecolor=_GROUND, layout="constrained")
    left, right = figure.subplots(1, 2)
    _panel(left, curves, 1, "all_reduce on 4 × H200, bf16, CUDA graphs: latency, µs")
    left.set_yscale("log")
    left.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    _panel(right, curves, 2, "times as fast as NCCL in the same run")
    right.set_ylim(bottom=0)
    legend = left.legend(loc="upper left", fontsize=9.5, frameon=False)
    for text in legend.get_texts():
        text.set_color(_TEXT)
    figure.savefig(path, facecolor=_GROUND, metadata={"Software": None, "Points": json.dumps(curves)})


_GENERATED = re.compile(r"(<!-- begin generated (.+?) -->\n).*?(<!-- end generated \2 -->)", re.DOTALL)


def pages() -> list[Path]:
    """Every page that has such tables."""
    every = [ROOT / "README.md", ROOT / "tuning_db" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [page for page in every if _GENERATED.search(page.read_text(encoding="utf-8"))]


def written(page: str) -> str:
    """Return the text of a page with its tables made anew."""
    return _GENERATED.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}", page)


def names(page: str) -> list[str]:
    """Return the names of the tables on a page."""
    return [match[2] for match in _GENERATED.finditer(page)]


if __name__ == "__main__":
    for path in pages():
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
    draw(PLOT)
