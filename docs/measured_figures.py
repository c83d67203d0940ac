"""Numbers in the text of the pages, in its order, each from files of bench/results; see docs/measured.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from statistics import geometric_mean

from measured_rows import KIB, MIB, ROOT, Run, by_shape, count, newest, only, p50, rows, runs, short
from measured_tables import ALL_REDUCE, COLLECTIVES, GEMMS, TORCH, host_costs

from tunedcomm import metrics


def largest_busbw() -> float:
    """Of all rows, in 1e9 bytes/s: what the links can carry at most."""
    return max(
        float(row["busbw_gb_s"]) for name in (ALL_REDUCE, COLLECTIVES) for row in rows(name) if row["busbw_gb_s"]
    )


def headline() -> list[str]:
    """NCCL's time over ours at 4 KiB and 2 MiB, that of PyTorch's best operator; level means within 2 %."""
    held = newest(ALL_REDUCE, "all_reduce", 4, needs=TORCH[1])
    if not 0.98 <= p50(held[256 * MIB], "library") / p50(held[256 * MIB], "tuned") <= 1.02:
        raise ValueError("tunedcomm and NCCL are not level at 256 MiB any more: correct the text")
    small, large = held[4 * KIB], held[2 * MIB]
    nccl = [p50(run, "library") / p50(run, "tuned") for run in (small, large)]
    torch = [min(p50(run, name) for name in TORCH) / p50(run, "tuned") for run in (small, large)]
    return [f"{nccl[0]:.1f} times", f"{nccl[1]:.1f} times", f"{torch[0]:.1f}", f"{torch[1]:.1f} times"]


def machine() -> list[str]:
    """NVLinks and versions of the largest file; all its rows must agree."""
    kinds = {tuple(row[name] for name in ("fabric", "torch", "triton", "nccl")) for row in rows(ALL_REDUCE)}
    ((fabric, torch, triton, nccl),) = kinds
    minor = [".".join(version.split(".")[:2]) for version in (torch, triton)]
    return [fabric.removeprefix("nvswitch-"), *minor, nccl]


def shipped_environment() -> list[str]:
    """The one environment of both shipped files, from their manifests."""
    found = []
    for world_size in (2, 4):
        path = ROOT / "tuning_db" / f"h200-nvswitch18-x{world_size}.db.manifest.json"
        found += json.loads(path.read_text(encoding="utf-8"))["environments"]
    (numbers,) = {
        (str(e["num_sms"]), str(e["num_links"]), e["torch"].partition("+")[0], e["triton"], e["nccl"], e["driver"])
        for e in found
    }
    return list(numbers)


def two_shot_in_place() -> list[str]:
    """How far PyTorch's two-shot is ahead."""
    run = newest(ALL_REDUCE, "all_reduce", 2)[128 * MIB]
    return [f"{100 * (p50(run, 'tuned') / p50(run, 'torch_two_shot_symmetric') - 1):.0f} %"]


def hosts_differ() -> list[str]:
    """Least and most that one operator cost."""
    times = [float(run["torch_one_shot"]) for run in host_costs()]
    return [f"{min(times):.2f} µs", f"{max(times):.2f} µs"]


def eager_parts() -> list[str]:
    """Parts of an eager call in the runs that the text names."""
    held = host_costs()

    def above(number: int) -> float:
        return float(held[number - 1]["above_launch"])

    def share(number: int) -> str:
        return f"{above(number) / float(held[number - 1]['torch_one_shot']):.2f}"

    first = [f"{float(held[0][name]):.2f}" for name in ("tuned", "launch", "allocation")]
    found = [f"{first[0]} µs", *first[1:]]
    for one, other in ((4, 5), (6, 7), (8, 9), (10, 11)):
        found += [f"{above(one):.2f}", f"{above(other):.2f} µs"]
        found += [share(one), share(other)] if one > 4 else []
    return [*found, f"{above(12):.2f} µs", share(12)]


def gemms_in_short() -> list[str]:
    """Means over the GEMM alone of many rows; least and most over NCCL of few."""
    found = []
    for op in ("gemm_rs", "ag_gemm", "gemm_ar"):
        large = [run for shape, run in by_shape(GEMMS, op, 4).items() if int(shape.partition("x")[0]) >= 2048]
        found.append(f"{geometric_mean([p50(run, 'tuned') / p50(run, 'cublas') for run in large]):.2f}")
    few = [run for shape, run in by_shape(GEMMS, "gemm_ar", 4).items() if int(shape.partition("x")[0]) <= 256]
    faster = sorted(p50(run, "library") / p50(run, "tuned") for run in few)
    return ["2048", *found, f"{faster[0]:.2f}", f"{faster[-1]:.2f} times"]


def near_the_floor() -> list[str]:
    """Share of the links' bandwidth from 128 MiB on, over all runs; the floor of 128 MiB; and the bandwidth."""
    shares, link = [], largest_busbw()
    for name in (ALL_REDUCE, COLLECTIVES):
        for size, held in runs(name, "all_reduce", 4).items():
            floor = metrics.floor_us("all_reduce", size, 4, link)
            complete = [run for run in held if {"tuned", "library"} <= set(run)] if size >= 128 * MIB else []
            shares += [100 * floor / p50(run, who) for run in complete for who in ("tuned", "library")]
    floor = metrics.floor_us("all_reduce", 128 * MIB, 4, link)
    return [f"{min(shares):.0f}", f"{max(shares):.0f} %", f"{floor:.0f} µs", f"{link:.0f} GB/s"]


def copy_engines() -> list[str]:
    """NCCL's time over that of copy engines and of SMs; they must be behind everywhere."""
    held = newest(COLLECTIVES, "all_gather", 2)

    def best(run: Run) -> float:
        return min(p50(run, name) for name in ("lamport", "pull", "push") if name in run)

    if any(p50(run, "copy_engine") < best(run) for run in held.values()):
        raise ValueError("copy engines are ahead at some size: correct the text")
    run = held[128 * MIB]
    first, second = (p50(run, "library") / p50(run, name) for name in ("copy_engine", "push"))
    return [f"{first:.2f} times", f"{second:.2f}"]


def hidden_size() -> list[str]:
    """Of every row with a norm."""
    (size,) = {row["shape"].partition("x")[2] for row in rows(COLLECTIVES) if row["op"] == "all_reduce_rms_norm"}
    return [size]


def bound_of_lamport() -> list[str]:
    """What the bound costs it at 4 KiB, or at 64 if that is more."""
    extra = []
    for size in ("4096", "65536"):
        bounded, unbounded = (
            only("bound_cost_h200.csv", message_bytes=size, contender=f"lamport:{build}")
            for build in ("bounded", "unbounded")
        )
        extra.append(float(bounded["latency_p50_us"]) - float(unbounded["latency_p50_us"]))
    return [f"{max(extra):.2f} µs"]


def two_gangs() -> list[str]:
    """Trials a minute of two gangs over one."""
    one, two = (
        float(only("tuner/sweeps_h200.csv", world_size="2", gangs=gangs, triton_cache="full")["trials_per_minute"])
        for gangs in ("1", "2")
    )
    return [f"{two / one:.1f} times"]


def odd_sizes() -> list[str]:
    """How many sizes the rules were tried at; `dispatch` must not have lost to the library at any."""
    held = [row for row in rows("replay/regret_rules_h200.csv") if row["rule"] == "dispatch"]
    if min(float(row["library_over_choice_least"]) for row in held) < 1:
        raise ValueError("dispatch was slower than the library somewhere: correct the text")
    (sizes,) = {row["sizes"] for row in held}
    return [sizes]


def finals_left_out() -> list[str]:
    """Choices, those that changed, and those of them that became better; none may have become worse."""
    held = rows("replay/regret_thinned_h200.csv")
    total = {name: sum(int(row[name]) for row in held) for name in ("choices", "changed", "better", "worse")}
    if total["worse"] or total["better"] + sum(int(row["unmeasured"]) for row in held) != total["changed"]:
        raise ValueError("some choices became worse: correct the text")
    return [count(total["choices"]), str(total["changed"]), str(total["better"])]


def scale_replay() -> list[str]:
    """The server's version, and what a trial sleeps."""
    ((version, sleep),) = {(row["postgresql"], row["replay_trial_s"]) for row in rows("replay/scale_replay.csv")}
    return [version, f"{sleep} s"]


def workers_at_work() -> list[str]:
    """Trials a second over what they would be if sharing cost nothing, up to 16 workers; to the lower ten."""
    held = [row for row in rows("replay/scale_replay.csv") if int(row["workers"]) <= 16 and row["killed"] == "0"]
    least = min(float(row["trials_per_s"]) / float(row["ideal_per_s"]) for row in held)
    return [f"{int(10 * least) * 10} %"]


def trials_of_a_processor() -> list[str]:
    """Trials a second that keep one processor of the server busy, to a hundred."""
    quiet = only("replay/scale_replay.csv", workers="16", killed="0")
    return [f"{round(1000 / float(quiet['server_cpu_ms']), -2):.0f}"]


def one_large_file() -> list[str]:
    """Size and times of bench/db_scale.py."""
    (row,) = rows("db/db_scale.csv")
    return [
        count(row["trials"]),
        f"{float(row['file_mib']):.0f} MiB",
        count(row["snapshot_trials"]),
        count(row["snapshot_rows"]),
        *(f"{short(row[name])} ms" for name in ("snapshot_uncached_ms", "snapshot_cold_ms", "lookup_ms")),
        short(row["start_up_ms"]),
        f"{short(row['explain_ms'])} ms",
    ]


def many_readers_and_writers() -> list[str]:
    """Of bench/db_concurrency.py; nothing may have gone wrong."""
    (row,) = rows("db/db_concurrency.csv")
    if any(int(row[name]) for name in ("errors", "lost", "doubled", "torn", "shrunk")) or row["integrity"] != "ok":
        raise ValueError("something went wrong: correct the text")
    return [f"{row['seconds']} s", count(row["rows_written"]), f"{int(row['rows_read']) / 1e6:.1f} million"]


def winners_again() -> list[str]:
    """Of bench/verify_again.py."""
    graph, eager = (only("replay/verify_again_h200.csv", mode=mode) for mode in ("graph", "eager"))
    total = int(graph["winners"]) + int(eager["winners"])
    held = int(graph["held"]) + int(eager["held"])
    if held != total or graph["slower_found"] != graph["winners"] or float(eager["made_slower"]) != 2:
        raise ValueError("not all winners held, or not all slower kernels were found: correct the text")
    ends = [f"{float(eager[name]):.1f}" for name in ("own_min", "own_max", "library_min", "library_max")]
    return [
        *(ends[0], f"{ends[1]} times", ends[2], f"{ends[3]} times"),
        str(held),
        f"{100 * (float(graph['made_slower']) - 1):.0f} %",
        eager["slower_found"],
        eager["winners"],
    ]


def replays() -> list[str]:
    """The fewest replayed launches of a variant that ran; none may have been wrong."""
    ran = [row for row in rows("stress/replays_h200.csv") if int(row["launches"])]
    assert not any(int(row["wrong"]) for row in ran)
    return [count(min(int(row["launches"]) for row in ran))]


def model_on_one_gpu() -> list[str]:
    """The largest errors, in forward and in training, of four ranks that share a GPU; all must have served calls."""
    found = [row for row in rows("model/llama_tp_loopback_h200.csv") if row["configuration"] != "library_eager"]
    assert {(row["status"], row["world_size"]) for row in found} == {("ok", "4")}
    assert all(int(row["num_served"]) or row["collectives"] for row in found)
    forward = max(float(row["error"]) for row in found if row["workload"] != "train")
    train = max(float(row["error"]) for row in found if row["workload"] == "train")
    return [f"{100 * error:.1f} %" for error in (forward, train)]


FIGURES: dict[str, Callable[[], list[str]]] = {
    "headline": headline,
    "machine": machine,
    "shipped environment": shipped_environment,
    "two-shot in place on 2 GPUs": two_shot_in_place,
    "hosts differ": hosts_differ,
    "parts of an eager call": eager_parts,
    "gemms in short": gemms_in_short,
    "all_reduce near the floor": near_the_floor,
    "copy engines on 2 GPUs": copy_engines,
    "hidden size": hidden_size,
    "bound of lamport": bound_of_lamport,
    "two gangs": two_gangs,
    "odd sizes": odd_sizes,
    "finals left out": finals_left_out,
    "scale replay": scale_replay,
    "workers at work": workers_at_work,
    "trials a second of a processor": trials_of_a_processor,
    "one large file": one_large_file,
    "many readers and writers": many_readers_and_writers,
    "winners measured again": winners_again,
    "replays": replays,
    "model on one GPU": model_on_one_gpu,
}
