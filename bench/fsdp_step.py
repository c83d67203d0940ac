"""Time FSDP2's communication: fp32 sums of bf16 gradients, a training step, and a GEMM beside a gather.

    torchrun --nproc-per-node 2 bench/fsdp_step.py --csv fsdp_step.csv
    torchrun --nproc-per-node 2 bench/fsdp_step.py --numel 4096 --layers 1 --tokens 8 --hidden 64 --heads 4 \
        --kv-heads 2 --ffn 96 --gemm 64 --gather-bytes 4096 --rounds 2 --calls 1   # on CPUs

`scatter`: reduce_scatter of bf16 into fp32 sums, of --numel input elements a rank and of a layer's, eagerly and in CUDA
graphs. The variants for it run with their default and configs around it, on plain and symmetric inputs, beside NCCL's
bf16 and fp32 ones (`nccl_fp32` gets wide inputs, `nccl_widening` makes them). `tuned` is what the databases choose;
`pinned` is the public function with the fastest eager candidate, `fsdp` the call that FSDP2 makes of it, with the
allocation of its buffers. Errors are ‖out − ref‖ / ‖ref‖ beside NCCL's fp32 sums.

`step`: forward and backward of Llama 3 layers (8B by default) with fp32 weights, without an optimiser. `stock_*` reduce
in bf16 and fp32; `ours` is `tunedcomm.fsdp.install(wire=torch.bfloat16)` by the databases. `ours_pinned` runs the
fastest reduce-scatter measured above, `ours_copies` has gathers by copy engines too, `ours_few_sms` the same with the
fastest reduce-scatter on --few-sms SMs. `compute` is the step of a bf16 model on one rank: the others' exposed
communication is their time beyond it. With --compile each layer is compiled, so that the host is not the limit. Errors
compare the gradients with the gradients of `stock_fp32`.

`gemm`: a square bf16 GEMM on one stream while another gathers --gather-bytes (of the result).

Contenders take turns. The slowest rank's median counts.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from llama_model import Sizes, Stack, build, seeded
from ranks import compile_all, everyones, row_of, slowest, times_in_turn
from rows import arguments, of_run
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import tunedcomm
import tunedcomm.fsdp
from tunedcomm import kernels
from tunedcomm.bench.csv import append_rows
from tunedcomm.dispatch.communicator import Communicator
from tunedcomm.dispatch.decide import decide
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.errors import InfeasibleError
from tunedcomm.ops.symmetric import symmetric_empty
from tunedcomm.selection.snapshot import Pinned
from tunedcomm.spec import Candidate, Problem, check_candidate, get_op, get_variant, variants
from tunedcomm.tuner.gang.protocol import Latency
from tunedcomm.tuner.gang.ranks import join_group
from tunedcomm.tuner.measure import timing

PARTS = ["scatter", "step", "gemm"]
AXES: dict[str, tuple[Any, ...]] = {
    "num_blocks": (16, 32, 64, 132, 264), "num_chunks": (4, 16, 32, 64, 128), "num_warps": (8, 16),
    "items": (1, 2), "split": (False, True),
}  # fmt: skip
# Pairs of axes of which both may differ from the default.
PAIRS = (("num_blocks", "num_chunks"), ("num_blocks", "num_warps"), ("num_blocks", "split"))
COPIES: dict[str, tuple[Any, ...]] = {"num_streams": (1, 2), "num_chunks": (1, 2, 4, 8), "direction": ("push", "pull")}
GRAPHS = 12  # candidates of a size that are measured in graphs, too
WARM_UP = 3  # steps
Call = Callable[[], Any]
Row = dict[str, Any]


class Bench:
    """This rank's options, streams and rows."""

    def __init__(self, options: Any, device: torch.device) -> None:
        self.options, self.device, self.world_size = options, device, dist.get_world_size()
        self.on_gpu = device.type == "cuda"
        # Everything runs on this stream, on which graphs can be captured.
        self.stream = torch.cuda.Stream(device) if self.on_gpu else None
        if self.stream is not None:
            torch.cuda.set_stream(self.stream)
        self.run = of_run(get_communicator(None, device).environment)

    def group(self) -> tuple[Any, Communicator]:
        """A group of all ranks with a communicator of its own."""
        group = dist.new_group()
        return group, get_communicator(group, self.device)

    def report(self, title: str, rows: Sequence[Row], base: Row, **more: Callable[[Row], float]) -> None:
        """Print rows on rank 0, with `base`'s time over theirs and what `more` makes of them, and append them."""
        if dist.get_rank() != 0:
            return
        heads = "".join(f" {name:>9}" for name in (*more, "speed-up"))
        print(f"\n{title}\n{'':36} {'p50 us':>11} {'p10':>11} {'p90':>11}{heads}  over {base['contender']}")
        for row in sorted(rows, key=lambda row: row["latency_p50_us"]):
            times = " ".join(f"{row[f'latency_{name}_us']:11.1f}" for name in ("p50", "p10", "p90"))
            figures = (*(figure(row) for figure in more.values()), base["latency_p50_us"] / row["latency_p50_us"])
            error = f"error {row['error']:.0e} " if "error" in row else ""
            print(f"{row['contender']:36} {times}{''.join(f' {x:9.3f}' for x in figures)}  {error}{row['config']}")
        print(end="", flush=True)
        if self.options.csv is not None:
            append_rows(self.options.csv, [{**row, **self.run} for row in rows])

    def timed(self, call: Call, *, graph: bool) -> timing.TimedRun:
        """The calls of one round, after two that warm up."""
        calls = self.options.calls

        def run() -> None:
            for _ in range(calls):
                call()

        call()
        call()
        if self.stream is None or not graph:
            return timing.TimedRun(run, calls, eager=True)
        return timing.TimedRun(timing.capture(run, self.stream).replay, calls, eager=False)

    def latencies(self, calls: Sequence[Call], *, graph: bool) -> list[Latency]:
        """One for each call; they take turns."""
        return slowest(times_in_turn([self.timed(c, graph=graph) for c in calls], self.options.rounds, self.stream))


def near_default(
    problem: Problem, communicator: Communicator, name: str, axes: dict[str, tuple[Any, ...]]
) -> Iterator[Candidate]:
    """The default of a variant and what differs from it in one axis or a pair of PAIRS, of what can run."""
    variant = get_variant(problem.op, name)
    default = variant.default_config(problem, communicator.limits)
    known = [axis for axis in variant.space.names if axis in axes]
    configs = [default, *({**default, axis: value} for axis in known for value in axes[axis])]
    for one, other in PAIRS:
        if one in known and other in known:
            both = itertools.product(axes[one], axes[other])
            configs += [{**default, one: first, other: second} for first, second in both]
    seen = dict.fromkeys(Candidate.of(problem.op, name, config) for config in configs)
    yield from (each for each in seen if check_candidate(problem, each, communicator.limits) is None)


def pin(communicator: Communicator, *choices: tuple[Problem, Candidate]) -> None:
    """Have a group run these candidates at these problems, whatever the databases hold."""
    pins = [Pinned(problem=problem, candidate=candidate, reason="bench") for problem, candidate in choices]
    communicator.replace_snapshot(replace(communicator.snapshot, pins=(*communicator.snapshot.pins, *pins)))


def chosen(problem: Problem, communicator: Communicator, max_sms: int | None = None) -> Candidate:
    """The candidate that a group runs at a problem."""
    return decide(problem, communicator.snapshot, communicator.limits, max_sms=max_sms).candidate


class Scatter:
    """reduce_scatter of bf16 into fp32 sums, of `numel` elements a rank."""

    def __init__(self, bench: Bench, communicator: Communicator, numel: int) -> None:
        self.bench, self.communicator, self.numel = bench, communicator, numel
        shape = (numel // bench.world_size,)
        self.narrow = Problem("reduce_scatter", shape, "bfloat16", bench.world_size, mode="eager")
        self.wide = replace(self.narrow, layout="float32")
        self.x = seeded(f"x{communicator.rank}", (numel,), bench.device, torch.bfloat16)
        self.inputs = {"plain": self.x}
        if communicator.workspace is not None:
            symmetric = symmetric_empty(numel, dtype=self.x.dtype, device=bench.device, group=communicator.group)
            self.inputs["symmetric"] = symmetric.copy_(self.x)
        self.out = torch.empty(shape, device=bench.device)
        self.found: list[tuple[float, Problem, Candidate]] = []  # times of eager calls, the fastest first

    def to_time(self) -> list[tuple[Problem, Candidate]]:
        """Configs of all variants on plain inputs; on symmetric ones too where peers then read them in place."""
        found = []
        for kind, name in itertools.product(self.inputs, variants("reduce_scatter")):
            if name.endswith("_fp32"):
                problem = replace(self.wide, input_kind=kind)  # type: ignore[arg-type]
                near = list(near_default(problem, self.communicator, name, AXES))
                is_same = kind == "symmetric" and name.startswith("push")
                found += [(problem, candidate) for candidate in near[: 1 if is_same else None]]
        return found

    def fastest(self, max_sms: int | None = None) -> list[tuple[Problem, Candidate]]:
        """Pins of eager sums and means by the fastest candidate, if there is one."""
        for _, problem, candidate in self.found:
            num_sms = get_variant(candidate.op, candidate.variant).num_blocks(problem, candidate.config_dict)
            if max_sms is None or num_sms <= max_sms:
                return [(replace(problem, reduction=reduction), candidate) for reduction in ("sum", "avg")]
        return []

    def bound(self, problem: Problem, candidate: Candidate, x: torch.Tensor, out: torch.Tensor) -> Call:
        launch = self.communicator.bind(problem, candidate)
        stream = 0 if self.bench.stream is None else self.bench.stream.cuda_stream
        return lambda: launch((x,), (out,), stream)

    def library(self, mode: str) -> list[tuple[Problem, str, Call]]:
        library = Candidate.of("reduce_scatter", "library", {})
        found = []
        for name, problem, x in (
            ("nccl_bf16", self.narrow, self.x),
            ("nccl_fp32", replace(self.narrow, dtype="float32"), self.x.float()),
            ("nccl_widening", self.wide, self.x),
        ):
            out = self.out.to(x.dtype) if name == "nccl_bf16" else self.out
            in_mode = replace(problem, mode=mode)  # type: ignore[arg-type]
            found.append((in_mode, name, self.bound(in_mode, library, x, out)))
        return found

    def measure(self, mode: str) -> None:
        """All candidates in eager calls, the fastest of them in graphs."""
        to_time = self.to_time() if mode == "eager" else [choice[1:] for choice in self.found[:GRAPHS]]
        library = self.library(mode)
        library[1][2]()
        expected = self.out.clone()
        contenders: list[tuple[Problem, str, Candidate | None, Call]]
        contenders = [(problem, name, None, call) for problem, name, call in library]
        for eager, config in to_time:
            problem = replace(eager, mode=mode)  # type: ignore[arg-type]
            with contextlib.suppress(InfeasibleError):  # on every rank alike
                call = self.bound(problem, config, self.inputs[problem.input_kind], self.out)
                name = config.variant + (" symmetric" if problem.input_kind == "symmetric" else "")
                contenders.append((problem, name, config, call))
        tuned = replace(self.wide, mode=mode)  # type: ignore[arg-type]
        contenders.append((tuned, "tuned", chosen(tuned, self.communicator), self.through(None)))
        errors = [0.0 if name == "nccl_bf16" else self.error(call, expected) for _, name, _, call in contenders]
        latencies = self.bench.latencies([call for *_, call in contenders], graph=mode == "graph")
        rows = []
        for (problem, name, candidate, _), latency, error in zip(contenders, latencies, errors, strict=True):
            row = row_of(problem, name, str(candidate or ""), latency)
            rows.append(row if name == "nccl_bf16" else row | {"error": error})
            if candidate is not None and name != "tuned" and mode == "eager":
                self.found.append((latency.p50_us, problem, candidate))
        self.found.sort(key=lambda choice: choice[0])
        self.bench.report(f"reduce_scatter bf16 -> fp32, {self.numel} elements a rank, {mode}", rows, rows[0])

    def error(self, call: Call, expected: torch.Tensor) -> float:
        """‖out − ref‖ / ‖ref‖ on the worst rank; infinite where there are NaN."""
        self.out.fill_(math.nan)
        call()
        found = float((self.out - expected).norm() / expected.norm())
        return max(everyones(math.inf if math.isnan(found) else found))

    def through(self, group: Any) -> Call:
        return partial(tunedcomm.reduce_scatter, self.x, out=self.out, out_dtype=torch.float32, group=group)

    def measure_calls(self, group: Any, communicator: Communicator) -> None:
        """The public function and FSDP2's call with the fastest candidate, in a group where it is pinned."""
        problem, name, nccl = self.library("eager")[0]
        contenders = [(name, "", nccl)]
        if pins := self.fastest():
            pin(communicator, *pins)
            pinned_at, served = pins[0][0], str(pins[0][1])
            if pinned_at.input_kind == "plain":
                contenders.append(("pinned", served, self.through(group)))
            contenders.append(("fsdp", served, self.as_fsdp(tunedcomm.fsdp.ReduceScatter(group, torch.bfloat16))))
        latencies = self.bench.latencies([call for *_, call in contenders], graph=False)
        rows = [
            row_of(problem if name == "nccl_bf16" else self.wide, name, config, latency)
            for (name, config, _), latency in zip(contenders, latencies, strict=True)
        ]
        self.bench.report(f"reduce_scatter bf16 -> fp32, {self.numel} elements a rank, calls", rows, rows[0])

    def as_fsdp(self, comm: tunedcomm.fsdp.ReduceScatter) -> Call:
        def call() -> None:
            grad_dtype = torch.bfloat16  # noqa: F841 - `allocate` looks for FSDP2's variable of this name
            asked: dict[str, Any] = {"dtype": torch.float32, "device": self.bench.device}
            x = comm.allocate((self.numel,), **asked)
            out = comm.allocate((self.numel // self.bench.world_size,), **asked)
            comm(out, x, comm.group, dist.ReduceOp.AVG)

        return call


def sizes_of(options: Any) -> Sizes:
    return Sizes(options.hidden, options.heads, options.kv_heads, options.hidden // options.heads, options.ffn)


def layer_numel(options: Any) -> int:
    """Elements of a layer's parameters."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Stack(sizes_of(options), 1).layers.parameters())


def stack(bench: Bench, dtype: torch.dtype) -> Stack:
    options = bench.options
    model = build(
        sizes_of(options), options.layers, plan="sequence", mesh=None, device=bench.device, dtype=dtype,
        tokens=options.tokens,
    )  # fmt: skip
    model.cos, model.sin = model.cos.bfloat16(), model.sin.bfloat16()
    if options.compile:
        for layer in model.layers:
            layer.compile()
    return model


def sharded(bench: Bench, reduce_dtype: torch.dtype, group: Any) -> Stack:
    """The model, each layer and the root wrapped, on all ranks."""
    model, kind = stack(bench, torch.float32), bench.device.type
    mesh = DeviceMesh.from_group(group, kind)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
        assert isinstance(module, FSDPModule)
        if not bench.on_gpu:  # gloo has no mean
            module.set_force_sum_reduction_for_comms(True)
    return model


def train(model: Stack, x: torch.Tensor) -> None:
    """One forward and backward pass."""
    model.zero_grad(set_to_none=True)
    x.grad = None
    model(x).float().square().mean().backward()


def gradients(model: Stack) -> list[torch.Tensor]:
    """This rank's shards."""
    return [parameter.grad.to_local() for parameter in model.parameters()]  # type: ignore[union-attr]


def measure_step(bench: Bench, scatter: Scatter) -> None:
    options, numel = bench.options, layer_numel(bench.options)
    gather = Problem("all_gather", (numel // bench.world_size,), "bfloat16", bench.world_size, "", mode="eager")
    copies = get_variant("all_gather", "copy_engine").default_config(gather, scatter.communicator.limits)
    by_copies = (gather, Candidate.of("all_gather", "copy_engine", copies))
    pins: dict[str, list[tuple[Problem, Candidate]]] = {"ours": []}
    if fastest := scatter.fastest():
        pins |= {"ours_pinned": fastest, "ours_copies": [*fastest, by_copies]}
    if few := scatter.fastest(options.few_sms):
        pins["ours_few_sms"] = [*few, by_copies]
    models = {
        "stock_bf16": sharded(bench, torch.bfloat16, dist.group.WORLD),
        "stock_fp32": sharded(bench, torch.float32, dist.group.WORLD),
        "compute": stack(bench, torch.bfloat16),
    }
    served: dict[str, tunedcomm.fsdp.Installed] = {}
    for name, choices in pins.items():
        group, communicator = bench.group()
        pin(communicator, *choices)
        models[name] = sharded(bench, torch.float32, group)
        served[name] = tunedcomm.fsdp.install(models[name], wire=torch.bfloat16)
    x = seeded(f"x{dist.get_rank()}", (1, options.tokens, options.hidden), bench.device, torch.bfloat16)
    x.requires_grad_()
    steps: dict[str, Call] = {name: partial(train, model, x) for name, model in models.items()}
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    reference, errors = torch.cat([each.reshape(-1) for each in gradients(models["stock_fp32"])]), {}
    for name, model in models.items():
        if name != "compute":
            found = torch.cat([each.reshape(-1) for each in gradients(model)])
            errors[name] = max(everyones(float((found - reference).norm() / reference.norm())))
            del found
    runs = [timing.TimedRun(step, 1, eager=not bench.on_gpu) for step in steps.values()]
    rows = {}
    for name, latency in zip(steps, slowest(times_in_turn(runs, options.rounds, bench.stream)), strict=True):
        config = ""
        if name in served:
            calls = served[name].calls()
            config = "; ".join(sorted({f"{call.call} by {call.served_by or 'library'}" for call in calls}))
        row = row_of(scatter.narrow, name, config, latency)
        row |= {"op": "fsdp_step", "shape": f"{options.layers}x{options.tokens}x{options.hidden}", "reduction": ""}
        rows[name] = row | ({"error": errors[name]} if name in errors else {})

    def over(name: str) -> Callable[[Row], float]:
        return lambda row: rows[name]["latency_p50_us"] / row["latency_p50_us"]

    def exposed_ms(row: Row) -> float:
        return float(row["latency_p50_us"] - rows["compute"]["latency_p50_us"]) / 1e3

    title = f"FSDP2 step of {options.layers} layers, {options.tokens} tokens a rank, forward and backward"
    bench.report(title, list(rows.values()), rows["stock_bf16"], fp32=over("stock_fp32"), exposed_ms=exposed_ms)
    if dist.get_rank() == 0:
        for name, installed in served.items():
            print(f"{name}: {installed}", flush=True)


def measure_gemm(bench: Bench) -> None:
    n, (group, communicator) = bench.options.gemm, bench.group()
    a, b = (seeded(name, (n, n), bench.device, torch.bfloat16) for name in "ab")
    c = torch.empty_like(a)
    numel = bench.options.gather_bytes // 2 // bench.world_size
    problem = Problem("all_gather", (numel,), "bfloat16", bench.world_size, "", mode="eager")
    (x,) = get_op("all_gather").make_inputs(problem, communicator.rank, 0, "random", bench.device)
    (out,) = get_op("all_gather").make_outputs(problem, bench.device)
    side = torch.cuda.Stream(bench.device) if bench.on_gpu else None
    handle = 0 if side is None else side.cuda_stream
    to_time = [Candidate.of("all_gather", "library", {})]
    for name, axes in (("copy_engine", COPIES), ("push", {"num_blocks": (8, 32, 64)})):
        to_time += near_default(problem, communicator, name, axes)
    compile_all((problem, candidate) for candidate in to_time)
    through = partial(tunedcomm.all_gather, x, out=out, group=group)
    gathers: list[tuple[str, Candidate, Call]] = [
        ("tuned", chosen(problem, communicator), through),
        ("tuned max_sms=0", chosen(problem, communicator, 0), partial(through, max_sms=0)),
    ]
    for config in to_time:
        with contextlib.suppress(InfeasibleError):  # on every rank alike
            name = "nccl" if config.variant == "library" else config.variant
            gathers.append((name, config, partial(communicator.bind(problem, config), (x,), (out,), handle)))

    def run(gather: Call | None, gemm: bool) -> None:
        """Both start together, the gather first in the queue, as a prefetch is."""
        if gather is not None and side is not None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                gather()
        elif gather is not None:
            gather()
        if gemm:
            torch.mm(a, b, out=c)
        if gather is not None and side is not None:
            torch.cuda.current_stream().wait_stream(side)

    calls: list[tuple[str, Candidate | None, Call]] = [("gemm", None, partial(run, None, True))]
    for name, config, gather in gathers:
        calls.append((f"{name} beside", config, partial(run, gather, True)))
        calls.append((f"{name} alone", config, partial(run, gather, False)))
    repeats = max(1, bench.options.calls // 3)

    def repeated(call: Call) -> None:
        for _ in range(repeats):
            call()

    for *_, call in calls:
        call()
    runs = [timing.TimedRun(partial(repeated, call), repeats, eager=not bench.on_gpu) for *_, call in calls]
    latencies = slowest(times_in_turn(runs, 2 * bench.options.rounds, bench.stream))
    rows = []
    for (name, candidate, _), latency in zip(calls, latencies, strict=True):
        row = row_of(problem, name, str(candidate or ""), latency)
        rows.append(row | ({"op": "mm", "shape": f"{n}x{n}x{n}"} if name == "gemm" else {}))
    gemm_us = rows[0]["latency_p50_us"]

    def over_gemm(row: Row) -> float:
        return math.nan if row["contender"].endswith("alone") else float(row["latency_p50_us"] / gemm_us)

    title = f"GEMM of {n}³ beside a gather of {bench.options.gather_bytes} bytes"
    bench.report(title, rows, rows[0], over_gemm=over_gemm, excess_us=lambda row: (over_gemm(row) - 1) * gemm_us)


def main() -> None:
    """Measure."""
    options = arguments(
        __doc__, parts=PARTS, numel=[1 << 25, 1 << 27], layers=4, tokens=1024, hidden=4096, heads=32, kv_heads=8,
        ffn=14336, gemm=8192, gather_bytes=64 << 20, few_sms=32, compile=False,
        rounds=15, calls=10, csv=None,
    )  # fmt: skip
    device = join_group()
    kernels.discover()
    bench = Bench(options, device)
    communicator = get_communicator(None, device)
    scatters = [Scatter(bench, communicator, numel) for numel in options.numel if "scatter" in options.parts]
    if "step" in options.parts:
        scatters.append(Scatter(bench, communicator, layer_numel(options)))
    compile_all(choice for scatter in scatters for choice in scatter.to_time())
    for scatter in scatters:
        scatter.measure("eager")
    pinned = bench.group()
    for scatter in scatters:
        scatter.measure_calls(*pinned)
    if "step" in options.parts:
        measure_step(bench, scatters[-1])
    if "gemm" in options.parts:
        measure_gemm(bench)
    if bench.on_gpu:  # last: beside a group's graphs its eager calls may take half of a GPU
        for scatter in scatters:
            scatter.measure("graph")
    communicator.check_peers()
    tunedcomm.release_communicators()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
