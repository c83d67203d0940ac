"""Layers of Llama 3 70B on 4 GPUs: PyTorch's tensor parallelism as it is, and with tunedcomm in and under it.

    torchrun --nproc-per-node 4 bench/llama_tp.py --csv bench/results/model/llama_tp_h200.csv
    torchrun --nproc-per-node 2 bench/llama_tp.py --tiny        # the same code on CPUs, with toy sizes

The model has random weights and the real shapes, and PyTorch's own plans (`bench/llama_model.py`). Workloads: `prefill`
of a sequence and `train`, a forward and a backward of it, with sequence parallelism; `decode_N`, a token of each of N
sequences with key and value caches, with plain tensor parallelism. Forward steps are replayed CUDA graphs; `train` is
called. `--tokens` are those of prefill and train, `--context` that of decode. Configurations: `library_eager`,
`library_compiled` and `async_tp_compiled` are PyTorch's own; `intercept_eager`, `intercept_compiled` and
`fusion_compiled` are tunedcomm's. `--only` and `--workload` choose some. All have the same weights and are measured in
turns, `--rounds` of each. A configuration that cannot run here is a row with the reason; one that fails ends the run.

A row is a configuration of a workload: percentiles over rounds, of the slowest rank, of a step's time in µs, and its
results' distance from those of `library_eager` (‖out − ref‖ / ‖ref‖, of the worst tensor on the worst rank).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple


def set_environment(*, tiny: bool) -> None:
    """Before torch is imported, for that is when some of these are read."""
    # Nothing may make multicast objects: NCCL and torch's symmetric memory would by themselves.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    if tiny:
        os.environ.setdefault("TRITON_INTERPRET", "1")
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
        os.environ.setdefault("OMP_NUM_THREADS", "1")


set_environment(tiny="--tiny" in sys.argv)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed._symmetric_memory as symm_mem  # noqa: E402
from llama_model import LLAMA_70B, TINY, Plan, build, seeded  # noqa: E402
from ranks import block_us, everyones, slowest, times_in_turn  # noqa: E402
from rows import Row, arguments, of_run  # noqa: E402
from torch import nn  # noqa: E402
from torch._inductor.custom_graph_pass import CustomGraphPass  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

import tunedcomm  # noqa: E402
from tunedcomm.bench.csv import append_rows  # noqa: E402
from tunedcomm.tuner.gang.protocol import Latency  # noqa: E402
from tunedcomm.tuner.gang.ranks import join_group  # noqa: E402
from tunedcomm.tuner.measure import timing  # noqa: E402

COLUMNS = (
    "workload,configuration,status,mode,layers,batch,tokens,context,dtype,world_size,latency_p10_us,latency_p50_us,"
    "latency_p90_us,us_per_layer,tokens_per_s,error,bit_equal,num_served,num_passed_on,served_by,collectives,reason,"
    "gpu,fabric,torch,triton,nccl,driver,tunedcomm,command,run_id,date"
).split(",")
WORKLOADS = ("prefill", "decode_1", "decode_8", "decode_64", "train")
# Largest ‖out − ref‖ / ‖ref‖ that another order of summation may cost, through all layers and back.
TOLERANCES = {torch.bfloat16: 3e-2, torch.float32: 1e-4}
_WARM_UP = 3  # steps, on GPUs
_NAMESPACES = ("_c10d_functional", "symm_mem", "tunedcomm")
# A laptop's databases hold nothing, and dispatch would run the library.
_FORCED_WHEN_TINY = {"all_reduce": "lamport", "all_gather": "lamport", "reduce_scatter": "lamport"}


class Configuration(NamedTuple):
    """A way to run the model: compiled as a whole, inside of `tunedcomm.intercept`, with what else in the compiler."""

    name: str
    compiled: bool = False
    intercepted: bool = False
    extra: Literal["", "async_tp", "fusion"] = ""


CONFIGURATIONS = {
    each.name: each
    for each in (
        Configuration("library_eager"),
        Configuration("intercept_eager", intercepted=True),
        Configuration("library_compiled", compiled=True),
        Configuration("intercept_compiled", compiled=True, intercepted=True),
        Configuration("fusion_compiled", compiled=True, intercepted=True, extra="fusion"),
        Configuration("async_tp_compiled", compiled=True, extra="async_tp"),
    )
}


class Workload(NamedTuple):
    """The input of a step, the plan of its model, and how often it is measured: `rounds` turns of `steps` steps."""

    name: str
    plan: Plan
    batch: int
    tokens: int
    steps: int
    rounds: int
    context: int = 0  # tokens that the caches hold, the new one included; 0: no caches
    train: bool = False  # forward and backward, else forward alone


def workloads(asked: argparse.Namespace) -> list[Workload]:
    """Those asked for, in the order in which they run."""
    tiny = asked.tiny
    tokens, context = (16, 12) if tiny else (asked.tokens, asked.context)
    rounds, batches = asked.rounds or 20, (1, 8) if tiny else (1, 8, 64)
    found = [
        Workload("prefill", "sequence", 1, tokens, 3, rounds),
        *(Workload(f"decode_{n}", "plain", n, 1, 20, asked.rounds or 30, context) for n in batches),
        Workload("train", "sequence", 1, tokens, 2, max(3, rounds // 2), train=True),
    ]
    if tiny:
        found = [each._replace(steps=1, rounds=2) for each in found]
    return [each for each in found if each.name in (asked.workload or WORKLOADS)]


class Step:
    """One step of a model; what it gave is kept for `results`."""

    def __init__(
        self, forward: Callable[[torch.Tensor], torch.Tensor], model: nn.Module, x: torch.Tensor, *, train: bool
    ) -> None:
        self._forward, self._model, self._train = forward, model, train
        self.x = x.requires_grad_(train)
        self.output: torch.Tensor | None = None

    def __call__(self) -> None:
        if not self._train:
            with torch.no_grad():
                self.output = self._forward(self.x)
            return
        self._model.zero_grad(set_to_none=True)
        self.x.grad = None
        y = self._forward(self.x)
        y.float().square().mean().backward()
        self.output = y.detach()

    def results(self) -> list[torch.Tensor]:
        """Copies of the output and of all gradients, this rank's parts."""
        found = [self.output]
        if self._train:
            found += [self.x.grad, *(parameter.grad for parameter in self._model.parameters())]
        if any(each is None for each in found):
            raise RuntimeError("a step gave no output, or an input or weight has no gradient")
        return [(each.to_local() if isinstance(each, DTensor) else each).detach().clone() for each in found]


def difference(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> tuple[float, bool]:
    """Largest relative error of a tensor, infinite where there are NaN; and whether all bits agree."""
    worst, same = 0.0, len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        error = float((one.double() - other.double()).norm() / other.double().norm().clamp_min(1e-30))
        worst = max(worst, error if math.isfinite(error) else math.inf)
        same = same and torch.equal(one, other)
    return worst, same


class Counting(CustomGraphPass):
    """A pass over a graph that Inductor lowers: counts what moves data between ranks, after an inner pass."""

    def __init__(self, inner: Callable[[torch.fx.Graph], None] | None) -> None:
        self.inner = inner
        self.found: Counter[str] = Counter()

    def __call__(self, graph: torch.fx.Graph) -> None:
        if self.inner is not None:
            self.inner(graph)
        for node in graph.nodes:
            namespace, _, name = str(node.target).partition(".")
            if node.op == "call_function" and namespace in _NAMESPACES and not name.startswith("wait_tensor"):
                self.found[name.partition(".")[0]] += 1

    def __deepcopy__(self, memo: dict[int, Any]) -> Counting:
        """Inductor copies its settings; a pass that knows a process group cannot be copied, and is not changed."""
        return self

    def uuid(self) -> None:
        """Not from a cache, for then nothing would be counted."""

    def __str__(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in sorted(self.found.items()))


@dataclass(slots=True)
class Prepared:
    """A configuration of a workload that is ready, and columns of what was seen on the way."""

    configuration: Configuration
    step: Step
    graph: torch.cuda.CUDAGraph | None = None
    error: float = math.inf
    bit_equal: bool = False
    served: dict[str, Any] = field(default_factory=dict)

    def count(self, calls: dict[Any, int], before: dict[Any, int]) -> None:
        """Note which calls of one step were served, and by what."""
        served: Counter[str] = Counter()
        passed_on = 0
        for call, count in calls.items():
            new = count - before.get(call, 0)
            if call.served_by:
                served[f"{call.call.partition('::')[2]} by {call.served_by.partition('(')[0]}"] += new
            else:
                passed_on += new
        by = ", ".join(f"{count} {what}" for what, count in served.items() if count)
        self.served = {"num_served": served.total(), "num_passed_on": passed_on, "served_by": by}


class Runner:
    """A whole run on one rank; the group of the mesh of all ranks is the one that is intercepted."""

    def __init__(self, asked: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> None:
        self.asked, self.mesh, self.device = asked, mesh, device
        self.group = mesh.get_group()
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.dtype = torch.float32 if asked.tiny else torch.bfloat16
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._counting: dict[str, Counting] = {}
        self._run = of_run(tunedcomm.get_communicator(self.group).environment)

    def run(self) -> None:
        """Measure every workload and configuration that was asked for."""
        for workload in workloads(self.asked):
            self._workload(workload)
            self._counting.clear()
            torch._dynamo.reset()
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _workload(self, workload: Workload) -> None:
        names = self.asked.only or list(CONFIGURATIONS)
        reasons = {name: self._why_unavailable(CONFIGURATIONS[name], workload.plan) for name in names}
        for name, reason in reasons.items():
            if reason:
                self._keep(self._row(workload, name, status="unavailable", reason=reason))
        model, x, expected = self._model(workload)
        ready = [
            self._prepare(workload, CONFIGURATIONS[name], model, x, expected)
            for name, reason in reasons.items()
            if not reason
        ]
        for each, latency in zip(ready, slowest(self._take_turns(workload, ready)), strict=True):
            figures = self._figures(workload, each, latency)
            wrong = figures["error"] > TOLERANCES[self.dtype]
            reason = f"the error is above {TOLERANCES[self.dtype]:g}" if wrong else ""
            name, status = each.configuration.name, "wrong" if wrong else "ok"
            self._keep(self._row(workload, name, status=status, reason=reason, **figures))
            if each.graph is not None:
                each.graph.reset()

    def _keep(self, row: Row) -> None:
        if self.rank == 0:
            told = "workload configuration status us_per_layer tokens_per_s error served_by collectives reason".split()
            print(*(row[name] for name in told if row[name] != ""), sep="  ", flush=True)
            if self.asked.csv:
                append_rows(self.asked.csv, [row], COLUMNS)

    def _why_unavailable(self, configuration: Configuration, plan: Plan) -> str:
        """Why a configuration cannot run here, the same on every rank; else ""."""
        if configuration.extra == "async_tp":
            if self.device.type != "cuda":
                return "async tensor parallelism needs symmetric memory on GPUs"
            if plan == "plain":
                return "nothing is gathered or scattered, so async tensor parallelism has nothing to overlap"
            if not hasattr(torch._inductor.config, "_micro_pipeline_tp"):
                return f"torch {torch.__version__} has no _micro_pipeline_tp"
        if configuration.extra == "fusion" and self.asked.tiny:
            return "the fusion pass works in Inductor, and --tiny compiles with aot_eager"
        return ""

    def _model(self, workload: Workload) -> tuple[nn.Module, torch.Tensor, list[torch.Tensor]]:
        """Model, input, and the library's results."""
        sizes = TINY if self.asked.tiny else LLAMA_70B
        model = build(
            sizes,
            self.asked.layers,
            plan=workload.plan,
            mesh=self.mesh,
            device=self.device,
            dtype=self.dtype,
            tokens=workload.tokens,
            context=workload.context,
            batch=workload.batch,
        )
        x = seeded("x", (workload.batch, workload.tokens, sizes.hidden), self.device, self.dtype)
        if workload.plan == "sequence":
            x = x.chunk(self.world_size, dim=1)[self.rank].clone()
        step = Step(model, model, x, train=workload.train)
        step()
        return model, x, step.results()

    def _compile(
        self, configuration: Configuration, model: nn.Module, *, graph: bool
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """The model as this configuration calls it; what is compiled alike is compiled once."""
        if not configuration.compiled:
            return model
        if self.asked.tiny:
            return torch.compile(model, backend="aot_eager", dynamic=False)
        counting = self._counting.get(configuration.extra)
        if counting is None:
            inner = None
            if configuration.extra == "fusion":
                inner = tunedcomm.fusion_pass(self.group, mode="graph" if graph else "eager")
            counting = self._counting[configuration.extra] = Counting(inner)
        options: dict[str, Any] = {"post_grad_custom_post_pass": counting}
        if configuration.extra == "async_tp":
            options["_micro_pipeline_tp"] = True
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # newer torch does it by itself
                symm_mem.enable_symm_mem_for_group(self.group.group_name)
        return torch.compile(model, dynamic=False, options=options)

    @contextlib.contextmanager
    def _within(self, configuration: Configuration) -> Iterator[Callable[[], dict[Any, int]]]:
        """Run a configuration's steps in this block, entered on all ranks together; gives its counts of calls."""
        with contextlib.ExitStack() as stack:
            if not configuration.intercepted:
                yield dict
                return
            for op, variant in _FORCED_WHEN_TINY.items() if self.asked.tiny else ():
                stack.enter_context(tunedcomm.force(op, variant))
            yield stack.enter_context(tunedcomm.intercept(self.group)).calls

    def _prepare(
        self,
        workload: Workload,
        configuration: Configuration,
        model: nn.Module,
        x: torch.Tensor,
        expected: list[torch.Tensor],
    ) -> Prepared:
        """Compile, choose, warm up, capture, and compare with the library's results."""
        forward = self._compile(configuration, model, graph=not workload.train)
        made = Prepared(configuration, Step(forward, model, x, train=workload.train))
        with self._within(configuration) as calls:
            for _ in range(_WARM_UP if x.is_cuda else 1):
                made.step()
            if self._stream is not None and not workload.train:
                self._stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self._stream):
                    made.step()
                before = calls()
                made.graph = timing.capture(made.step, self._stream)
            else:
                before = calls()
                made.step()
            made.count(calls(), before)
        if made.graph is not None:
            assert made.step.output is not None
            made.step.output.fill_(math.nan)  # what is compared is written by the replay
            made.graph.replay()
        made.error, made.bit_equal = difference(made.step.results(), expected)
        return made

    def _take_turns(self, workload: Workload, ready: Sequence[Prepared]) -> list[list[float]]:
        """This rank's µs a step, by configuration and round; who comes first changes from round to round."""
        graphs = [each.graph for each in ready if each.graph is not None]
        if graphs:
            runs = [partial(replay, graph, workload.steps) for graph in graphs]
            contenders = [timing.TimedRun(run, workload.steps, eager=False) for run in runs]
            times_in_turn(contenders, 1, self._stream)
            return times_in_turn(contenders, workload.rounds, self._stream)
        times: list[list[float]] = [[] for _ in ready]
        for number in range(workload.rounds):
            for index in timing.order_of_round(number, len(ready)):
                with self._within(ready[index].configuration):
                    if self._stream is not None:
                        ready[index].step()  # an intercepted group chooses at its first calls
                    times[index].append(block_us(ready[index].step, workload.steps, self.device, to_end=True))
        return times

    def _figures(self, workload: Workload, made: Prepared, latency: Latency) -> dict[str, Any]:
        errors, equal = zip(*everyones((made.error, made.bit_equal)), strict=True)
        counting = self._counting.get(made.configuration.extra) if made.configuration.compiled else None
        return {
            "mode": "graph" if made.graph is not None else "call",
            **{f"latency_{name}": round(getattr(latency, name), 3) for name in ("p10_us", "p50_us", "p90_us")},
            "us_per_layer": round(latency.p50_us / self.asked.layers, 3),
            "tokens_per_s": round(workload.batch * workload.tokens * 1e6 / latency.p50_us, 1),
            "error": max(errors),
            "bit_equal": all(equal),
            **made.served,
            "collectives": "" if counting is None else str(counting),
        }

    def _row(self, workload: Workload, name: str, *, status: str, reason: str, **figures: Any) -> Row:
        row = dict.fromkeys(COLUMNS, "") | self._run
        row |= {each: getattr(workload, each) for each in ("batch", "tokens", "context")}
        row |= {"workload": workload.name, "configuration": name, "status": status, "layers": self.asked.layers}
        row |= {"reason": reason, "dtype": str(self.dtype).removeprefix("torch."), "world_size": self.world_size}
        return row | figures


def replay(graph: torch.cuda.CUDAGraph, steps: int) -> None:
    for _ in range(steps):
        graph.replay()


def parsed() -> argparse.Namespace:
    sizes = {"layers": 0, "tokens": 4096, "context": 1024, "rounds": 0}
    asked = arguments(__doc__, tiny=False, only=[], workload=[], csv=None, **sizes)
    if unknown := {*asked.only} - {*CONFIGURATIONS} | {*asked.workload} - {*WORKLOADS}:
        sys.exit(f"{', '.join(sorted(unknown))}: not among {', '.join((*CONFIGURATIONS, *WORKLOADS))}")
    asked.layers = asked.layers or (1 if asked.tiny else 4)
    return asked


def main() -> None:
    asked, device = parsed(), join_group()
    Runner(asked, init_device_mesh(device.type, (dist.get_world_size(),)), device).run()
    tunedcomm.release_communicators()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
