"""Tables of the pages, each from files of bench/results; docs/measured.py puts them there."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from itertools import pairwise

from measured_models import intercept_cost, llama, stress
from measured_rows import MIB, ROOT, by_shape, count, newest, only, p50, rows, runs, short, size_text, table, us

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
