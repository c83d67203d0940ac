"""Tables of what a model gains, and of how often every variant was launched."""

from __future__ import annotations

from measured_rows import Row, count, rows, table

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
