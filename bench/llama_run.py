"""Runs the configurations of `bench/llama_tp.py` over its workloads, on one rank.

A configuration that fails, on whichever rank, becomes a row with the reason, and the others go on. All configurations
of a workload are measured in turns, after the last one is ready.
"""

from __future__ import annotations

import contextlib
import gc
import math
import secrets
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from llama_configurations import CONFIGURATIONS, Configuration, Setup
from llama_model import LLAMA_70B, TINY, build, seeded
from llama_ranks import Contender, Ranks, take_turns
from llama_report import COLUMNS, Row, append, line
from llama_steps import TOLERANCES, Step, Workload, difference, workloads
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tunedcomm.hardware import Environment
from tunedcomm.integrations.intercept import Interception

__all__ = ["Runner"]

_ENVIRONMENT = ("gpu", "fabric", "torch", "triton", "nccl", "driver", "tunedcomm")  # columns of the rows
_WARM_UP = 3  # steps, on GPUs
# A laptop's databases hold nothing, and dispatch would run the library.
_FORCED = {"all_reduce": "lamport", "all_gather": "lamport", "reduce_scatter": "lamport"}


@dataclass(slots=True)
class Prepared:
    """A configuration of a workload that is ready, and what was seen on the way."""

    configuration: Configuration
    step: Step
    within: Callable[[], contextlib.AbstractContextManager[Interception | None]]
    graph: torch.cuda.CUDAGraph | None = None
    note: str = ""
    error: float = math.inf
    bit_equal: bool = False
    num_served: int = 0
    num_passed_on: int = 0
    served_by: str = ""

    @property
    def contender(self) -> Contender:
        run = self.step if self.graph is None else self.graph.replay
        return Contender(run, self.within, graph=self.graph is not None)

    def first_calls(self) -> None:
        """Compile, choose and warm up; then look at what one step calls."""
        with self.within() as calls:
            for _ in range(_WARM_UP if self.step.x.is_cuda else 0):
                self.step()
            self._counted(calls)

    def capture(self) -> None:
        """One step as a CUDA graph."""
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with self.within() as calls, torch.cuda.stream(stream):
            self.step()
            torch.cuda.synchronize()

            def record() -> None:
                # NCCL's own thread asks for events meanwhile, which a stricter mode forbids.
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    self.step()

            self._counted(calls, record)
        self.graph = graph

    def compare(self, expected: list[torch.Tensor]) -> None:
        """With the library's results."""
        if self.graph is None:
            with self.within():
                self.step()
        else:
            assert self.step.output is not None
            self.step.output.fill_(math.nan)  # what is compared is written by the replay
            self.graph.replay()
        self.error, self.bit_equal = difference(self.step.results(), expected)

    def _counted(self, calls: Interception | None, run: Callable[[], None] | None = None) -> None:
        before = {} if calls is None else calls.calls()
        (run or self.step)()
        if calls is None:
            return
        served: Counter[str] = Counter()
        self.num_served = self.num_passed_on = 0
        for told, count in calls.calls().items():
            new = count - before.get(told, 0)
            if told.served_by:
                self.num_served += new
                served[f"{told.call.partition('::')[2]} by {told.served_by.partition('(')[0]}"] += new
            else:
                self.num_passed_on += new
        self.served_by = ", ".join(f"{count} {what}" for what, count in served.items() if count)


@dataclass(slots=True)
class Runner:
    """A whole run.

    Attributes:
        arguments: of the command line.
        mesh: of one dimension, all ranks.
        device: of this rank.
        environment: for the rows.
    """

    arguments: Namespace
    mesh: DeviceMesh
    device: torch.device
    environment: Environment
    rows: list[Row] = field(default_factory=list)
    ranks: Ranks = field(init=False)
    setup: Setup = field(init=False)
    _run_id: str = field(default_factory=lambda: secrets.token_hex(6))
    _doing: tuple[Workload, list[str]] | None = None  # configurations whose rows are to come

    def __post_init__(self) -> None:
        tiny = self.arguments.tiny
        of = self.arguments
        self.ranks = Ranks(self.device, of.stall_s, self._stalled, tracebacks=of.tracebacks)
        backend = self.arguments.backend or ("aot_eager" if tiny else "inductor")
        fuse = of.fuse or ("always" if tiny else "pays")
        self.setup = Setup(self.mesh.get_group(), self.device, backend, fuse, _FORCED if tiny else {})

    def run(self) -> list[Row]:
        """Rows of every workload and configuration that was asked for; on rank 0 they are in the CSV, too."""
        for workload in workloads(self.arguments):
            self._workload(workload)
            self._doing = None
            self.setup.forget()
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        return self.rows

    def _keep(self, rows: list[Row]) -> None:
        self.rows += rows
        if self.ranks.rank == 0:
            for row in rows:
                print(line(row), flush=True)
            if self.arguments.csv:
                append(self.arguments.csv, rows)

    def _stalled(self, stage: str) -> None:
        if self._doing is not None:
            reason = f"{stage} took over {self.arguments.stall_s:g} s; a rank may wait for one that failed"
            workload, names = self._doing
            self._keep([self._row(workload, name, status="stalled", reason=reason) for name in names])

    def _workload(self, workload: Workload) -> None:
        made: list[Any] = []
        names = self.arguments.only or list(CONFIGURATIONS)
        self._doing = (workload, names)
        failure = self.ranks.attempt(f"{workload.name}: the model", lambda: made.extend(self._model(workload)))
        ready: list[Prepared] = []
        for name in names:
            self._doing = (workload, [*(each.configuration.name for each in ready), name])
            status, reason = "unavailable", self.setup.unavailable(CONFIGURATIONS[name], workload.plan)
            if not reason and failure:
                status, reason = "failed", f"the model: {failure}"
            elif not reason and self.ranks.elapsed_s > self.arguments.limit_s:
                status, reason = "skipped", "no time was left (--limit-s)"
            elif not reason:
                model, x, expected = made
                begin = self.ranks.elapsed_s
                prepared, reason = self._prepare(workload, CONFIGURATIONS[name], model, x, expected)
                status = "failed"
                if not reason:
                    ready.append(prepared)
                self._log(f"{workload.name}: {name} was made ready in {self.ranks.elapsed_s - begin:.1f} s")
                for told in self.setup.told(CONFIGURATIONS[name]).splitlines():
                    self._log(f"{workload.name}: {told}")
            if reason:
                self._keep([self._row(workload, name, status=status, reason=reason)])
        self._doing = (workload, [each.configuration.name for each in ready])
        self._measure(workload, ready)
        for each in ready:
            if each.graph is not None:
                each.graph.reset()

    def _log(self, text: str) -> None:
        if self.ranks.rank == 0:
            print(f"[{self.ranks.host_s:.0f} s] {text}", flush=True)

    def _model(self, workload: Workload) -> tuple[nn.Module, torch.Tensor, list[torch.Tensor]]:
        """Model, input, and the library's results."""
        sizes, dtype = (TINY, torch.float32) if self.arguments.tiny else (LLAMA_70B, torch.bfloat16)
        model = build(
            sizes,
            self.arguments.layers,
            plan=workload.plan,
            mesh=self.mesh,
            device=self.device,
            dtype=dtype,
            tokens=workload.tokens,
            context=workload.context,
            batch=workload.batch,
        )
        x = seeded("x", (workload.batch, workload.tokens, sizes.hidden), self.device, dtype)
        if workload.plan == "sequence":
            x = x.chunk(self.ranks.world_size, dim=1)[self.ranks.rank].clone()
        step = Step(model, model, x, train=workload.train)
        step()
        return model, x, step.results()

    def _prepare(
        self,
        workload: Workload,
        configuration: Configuration,
        model: nn.Module,
        x: torch.Tensor,
        expected: list[torch.Tensor],
    ) -> tuple[Prepared, str]:
        """The configuration, and why it is not ready if it is not."""
        stage = f"{workload.name}: {configuration.name}"
        made: list[Prepared] = []

        def make() -> None:
            forward = self.setup.compile(configuration, model, graph=workload.graph)
            step = Step(forward, model, x, train=workload.train)
            made.append(Prepared(configuration, step, lambda: self.setup.within(configuration)))
            made[0].first_calls()

        failure = self.ranks.attempt(f"{stage}, first calls", make)
        if failure:
            return Prepared(configuration, Step(model, model, x, train=False), contextlib.nullcontext), failure
        prepared = made[0]
        if workload.graph and self.device.type == "cuda":
            failure = self.ranks.attempt(f"{stage}, capture", prepared.capture)
            if failure:
                prepared.note, prepared.graph = f"not captured: {failure}", None
        return prepared, self.ranks.attempt(f"{stage}, results", lambda: prepared.compare(expected))

    def _measure(self, workload: Workload, ready: list[Prepared]) -> None:
        times: list[list[float]] = []
        contenders = [each.contender for each in ready]

        def measure() -> None:
            times.extend(take_turns(self.ranks, contenders, rounds=workload.rounds, steps=workload.steps))

        failure = self.ranks.attempt(f"{workload.name}: timing", measure) if ready else ""
        for index, each in enumerate(ready):
            name = each.configuration.name
            if failure:
                self._keep([self._row(workload, name, status="failed", reason=f"timing: {failure}")])
                continue
            figures = self._figures(workload, each, times[index])
            wrong = figures["error"] > TOLERANCES[each.step.x.dtype]
            reason = f"the error is above {TOLERANCES[each.step.x.dtype]:g}" if wrong else each.note
            self._keep([self._row(workload, name, status="wrong" if wrong else "ok", reason=reason, **figures)])

    def _figures(self, workload: Workload, prepared: Prepared, times: list[float]) -> dict[str, Any]:
        latency = self.ranks.summary(times)
        errors = self.ranks.largest(torch.tensor([prepared.error, float(not prepared.bit_equal)], dtype=torch.float64))
        return {
            "mode": "graph" if prepared.graph is not None else "call",
            "latency_p10_us": round(latency.p10_us, 3),
            "latency_p50_us": round(latency.p50_us, 3),
            "latency_p90_us": round(latency.p90_us, 3),
            "us_per_layer": round(latency.p50_us / self.arguments.layers, 3),
            "tokens_per_s": round(workload.batch * workload.tokens * 1e6 / latency.p50_us, 1),
            "error": float(errors[0]),
            "bit_equal": not errors[1],
            "num_served": prepared.num_served,
            "num_passed_on": prepared.num_passed_on,
            "served_by": prepared.served_by,
            "collectives": self.setup.collectives(prepared.configuration),
        }

    def _row(self, workload: Workload, name: str, *, status: str, reason: str, **figures: Any) -> Row:
        row: Row = dict.fromkeys(COLUMNS, "")
        row |= {each: getattr(self.environment, each) for each in _ENVIRONMENT}
        row |= {each: getattr(workload, each) for each in ("batch", "tokens", "context")}
        row |= {"workload": workload.name, "configuration": name, "status": status, "layers": self.arguments.layers}
        row |= {"reason": " ".join(reason.split())[:400], "dtype": "float32" if self.arguments.tiny else "bfloat16"}
        row |= {"world_size": self.ranks.world_size, "run_id": self._run_id}
        row["command"] = " ".join(["bench/llama_tp.py", *(Path(each).name for each in sys.argv[1:])])
        row["date"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return row | figures
