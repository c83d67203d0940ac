"""One rank of `tunedcomm bench`: `python -m tunedcomm.cli._bench_rank JOB RESULT` under the elastic launcher.

All contenders of a problem run in one process and interleaved, a replay (or an eager loop) each in turn, in an order
that changes from round to round.
"""

from __future__ import annotations

import csv
import json
import os
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from tunedcomm import kernels
from tunedcomm.cli._ceiling import add_ceiling_shares
from tunedcomm.cli._entrants import Entrant, Field, Tensors, agreed, entrants_of
from tunedcomm.cli._peer_files import load_adapter
from tunedcomm.dispatch.communicator import Communicator, get_communicator
from tunedcomm.hardware import gpu_of
from tunedcomm.metrics import algbw_gb_s, payload_bytes
from tunedcomm.ops.symmetric import symmetric_empty
from tunedcomm.spec import Problem, format_shape, get_op, parse_shape
from tunedcomm.tuner.measure import Contender, calls_for, contend, summarise, take_rounds

__all__ = ["COLUMNS", "Bencher", "main", "problems_of"]

COLUMNS = (
    "op,shape,message_bytes,dtype,world_size,mode,contender,config,latency_p10_us,latency_p50_us,latency_p90_us,"
    "algbw_gb_s,busbw_gb_s,num_sms,error,gpu,fabric,torch,triton,nccl,driver,tunedcomm,command,run_id,date,"
    "input_kind,in_place,reduction,layout,scaling,ceiling_share"
).split(",")
_ROUNDS = 25
# Fused GEMMs of other projects signal for every tile.
_PEERS_SIGNAL_BYTES = 1 << 20


class _Ranks:
    """What `take_rounds` needs of a gang."""

    def __init__(self, device: torch.device) -> None:
        self._token = torch.zeros(1, device=device)
        self.on_gpu = device.type == "cuda"

    def device_barrier(self) -> None:
        dist.all_reduce(self._token)


def _error(results: Tensors, references: Tensors) -> torch.Tensor:
    """‖out − ref‖ / ‖ref‖ of the worst output on this rank; a NaN counts as infinite."""
    worst = torch.zeros(1, dtype=torch.float64, device=references[0].device)
    for result, reference in zip(results, references, strict=True):
        difference = (result.reshape(-1).double() - reference.reshape(-1)).norm()
        worst = torch.maximum(worst, difference / reference.norm().clamp_min(1e-30))
    return worst.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _of_worst_rank(error: torch.Tensor) -> float:
    dist.all_reduce(error, dist.ReduceOp.MAX)
    return float(error.item())


class Bencher:
    """Runs the problems of a job on one rank."""

    def __init__(self, communicator: Communicator, job: dict[str, Any]) -> None:
        self._communicator = communicator
        self._job = job
        self.left_out: list[dict[str, str]] = []
        self._adapters = [load_adapter(Path(path)) for path in job["peers"]]
        self._ranks = _Ranks(communicator.device)
        on_gpu = communicator.device.type == "cuda"
        self._stream = torch.cuda.Stream(communicator.device) if on_gpu else None  # type: ignore[no-untyped-call]

    def rows(self, problem: Problem) -> list[dict[str, Any]]:
        """Rows of every contender that can run `problem`, the fastest setting of each name."""
        if self._stream is None:
            return self._measure(problem)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            rows = self._measure(problem)
        torch.cuda.synchronize()
        return rows

    def _measure(self, problem: Problem) -> list[dict[str, Any]]:
        spec, device = get_op(problem.op), self._communicator.device
        ranks = range(problem.world_size)
        everyone = [spec.make_inputs(problem, rank, self._job["seed"], "random", device) for rank in ranks]
        values = everyone[self._communicator.rank]
        reference = spec.reference(problem, everyone, self._communicator.rank)
        del everyone
        inputs: Tensors = tuple(torch.empty_like(value) for value in values)
        if problem.input_kind == "symmetric":  # the first is what peers read
            held = symmetric_empty(values[0].shape, dtype=values[0].dtype, device=device)
            inputs = (held, *inputs[1:])
        names = self._job["contenders"]
        field = entrants_of(
            self._communicator, problem, inputs, lambda name: names is None or name in names, self._adapters
        )
        errors = self._check(problem, field, values, reference)
        del reference
        entrants = field.entrants
        calls = self._calls(problem, entrants[0])
        contenders = [self._contend(problem, entrant, calls) for entrant in entrants]
        latencies = self._time(entrants, contenders, values)
        rows = [
            self._row(problem, entrant, latency, error)
            for entrant, latency, error in zip(entrants, latencies, errors, strict=True)
        ]
        place = {"shape": format_shape(problem.shape), "dtype": problem.dtype, "mode": problem.mode}
        self.left_out += [{**place, "peer": name, "why": why} for name, why in field.left_out]
        best: dict[str, dict[str, Any]] = {}
        for row in sorted(rows, key=lambda row: row["latency_p50_us"]):
            best.setdefault(row["contender"], row)
        add_ceiling_shares(problem, list(best.values()), self._job["link_gb_s"])
        return list(best.values())

    def _check(self, problem: Problem, field: Field, values: Tensors, reference: Tensors) -> list[float]:
        """Everyone's error; peers that fail or are wrong leave the field."""
        kept: list[Entrant] = []
        errors: list[float] = []
        for entrant in list(field.entrants):
            entrant.load(values)
            due = reference if entrant.reference is None else entrant.reference()  # of what it was given
            error: float | None
            if entrant.is_peer:
                error = self._try(problem, entrant, field, values, due)
            else:
                entrant.run(entrant.turns[0])  # binds plans of both modes, compiles what compiles late
                found = [self._launched(problem, entrant, values, due, graph=graph) for graph in self._ways(problem)]
                error = max(_of_worst_rank(error) for error in found)
            if error is not None:
                kept.append(entrant)
                errors.append(error)
        field.entrants[:] = kept
        return errors

    def _ways(self, problem: Problem) -> tuple[bool, ...]:
        """How calls are checked, by whether they are replayed: what a graph holds may be another kernel than a call."""
        return (False, True) if problem.mode == "graph" and self._stream is not None else (False,)

    def _launched(
        self, problem: Problem, entrant: Entrant, values: Tensors, due: Tensors, *, graph: bool
    ) -> torch.Tensor:
        """This rank's error of one call, made or replayed."""
        one = self._contend(problem, entrant, 1, graph=graph)
        entrant.load(values)
        one.run()
        if self._stream is not None:
            self._stream.synchronize()
        return _error(entrant.result(), due)

    def _try(self, problem: Problem, entrant: Entrant, field: Field, values: Tensors, due: Tensors) -> float | None:
        """The error of a peer's launches, eager and replayed; None, and why in the field, where it cannot take part."""
        most = get_op(problem.op).tolerance.get(problem.scaling or problem.dtype, 0.0)
        worst = 0.0
        for graph in self._ways(problem):
            reason: str | None = None
            error = torch.zeros(1, dtype=torch.float64, device=self._communicator.device)
            try:
                error = self._launched(problem, entrant, values, due, graph=graph)
            except Exception as raised:  # noqa: BLE001 - other people's code; what it raises is the reason
                told = (str(raised).splitlines() or [""])[0]
                reason = f"{'captured in a graph' if graph else 'run'}, it raised {type(raised).__name__}: {told}"
            reason = agreed(reason)
            if reason is None and (worst := max(worst, _of_worst_rank(error))) > most:
                how = "replayed from a graph" if graph else "launched"
                reason = f"wrong when {how}: its error is {worst:.1e}, at most {most:.1e} is right"
            if reason is not None:
                setting = f" ({entrant.config})" if entrant.config else ""
                field.left_out.append((entrant.name, f"{reason}{setting}"))
                return None
        return worst

    def _calls(self, problem: Problem, entrant: Entrant) -> int:
        if self._stream is None:
            return 1
        probe = [self._contend(problem, entrant, 10)]
        take_rounds(self._ranks, probe, 1, self._stream)
        mine = take_rounds(self._ranks, probe, 2, self._stream)[0]
        slowest = torch.tensor([max(mine)], device=self._communicator.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return calls_for(float(slowest.item()))

    def _contend(self, problem: Problem, entrant: Entrant, calls: int, *, graph: bool = True) -> Contender:
        def launch(inputs: Tensors, outputs: Tensors, stream: int) -> None:
            entrant.run(inputs)

        first, *further = entrant.turns
        graph = graph and problem.mode == "graph"
        return contend(launch, first, (), calls=calls, graph=graph, stream=self._stream, further=further)

    def _time(self, entrants: list[Entrant], contenders: list[Contender], values: Tensors) -> list[Any]:
        """Rounds of everyone; inputs are restored in between, since in place they grow from launch to launch."""
        times: list[list[float]] = [[] for _ in contenders]
        rounds = _ROUNDS if self._stream is not None else 3
        for number in range(rounds):
            for entrant in entrants:
                entrant.load(values)
            for index, new in enumerate(take_rounds(self._ranks, contenders, 1, self._stream, first=number)):
                times[index] += new
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, times)
        return [summarise([by_rank[index] for by_rank in everyone]) for index in range(len(contenders))]

    def _row(self, problem: Problem, entrant: Entrant, latency: Any, error: float) -> dict[str, Any]:
        spec, environment = get_op(problem.op), self._communicator.environment
        size = spec.message_bytes(problem)
        algbw = algbw_gb_s(payload_bytes(problem.op, size, problem.world_size), latency.p50_us)
        factor = spec.busbw_factor(problem.world_size) if spec.busbw_factor else None
        return {
            "op": problem.op,
            "shape": "x".join(str(extent) for extent in problem.shape),
            "message_bytes": size,
            "dtype": problem.dtype,
            "world_size": problem.world_size,
            "mode": problem.mode,
            "contender": entrant.name,
            "config": entrant.config,
            "latency_p10_us": round(latency.p10_us, 3),
            "latency_p50_us": round(latency.p50_us, 3),
            "latency_p90_us": round(latency.p90_us, 3),
            "algbw_gb_s": round(algbw, 3),
            "busbw_gb_s": round(algbw * factor, 3) if factor is not None else None,
            "num_sms": None if entrant.num_sms is None else min(entrant.num_sms, environment.num_sms),
            "error": float(f"{error:.3e}"),
            "gpu": environment.gpu,
            "fabric": environment.fabric,
            "torch": environment.torch,
            "triton": environment.triton,
            "nccl": environment.nccl,
            "driver": environment.driver,
            "tunedcomm": environment.tunedcomm,
            "command": self._job["command"],
            "run_id": self._job["run_id"],
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "input_kind": problem.input_kind,
            "in_place": problem.in_place,
            "reduction": problem.reduction,
            "layout": problem.layout,
            "scaling": problem.scaling,
            "ceiling_share": None,
        }


def problems_of(job: dict[str, Any], world_size: int) -> list[Problem]:
    return [
        Problem(
            op=job["op"],
            shape=parse_shape(shape),
            dtype=dtype,
            world_size=world_size,
            input_kind=kind,
            reduction=next(iter(get_op(job["op"]).reductions), ""),
            in_place=kind == "symmetric" and get_op(job["op"]).in_place,
            layout=job["layout"],
            scaling=job["scalings"][dtype],
            mode=mode,
        )
        for mode in job["modes"]
        for kind in job["input_kinds"]
        for dtype in job["dtypes"]
        for shape in job["shapes"]
    ]


def _append_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists() or path.stat().st_size == 0
    with path.open("a+", newline="", encoding="utf-8") as file:
        file.seek(0)
        columns = COLUMNS if fresh else next(csv.reader(file))  # a file of an older version keeps those that it has
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        if fresh:
            writer.writeheader()
        writer.writerows(rows)


def main(job_file: str, result_file: str) -> int:
    """Body of one rank; rank 0 writes the rows."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    job.setdefault("command", shlex.join(["tunedcomm", "bench", "--op", job["op"]]))
    on_gpu = torch.cuda.is_available()
    device = gpu_of(int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    kernels.discover()
    if job["peers"] and on_gpu and hasattr(symm_mem, "set_signal_pad_size"):  # torch 2.9 has no such function
        symm_mem.set_signal_pad_size(max(_PEERS_SIGNAL_BYTES, symm_mem.get_signal_pad_size()))
    communicator = get_communicator(None, device)
    bencher = Bencher(communicator, job)
    rows: list[dict[str, Any]] = []
    for problem in problems_of(job, communicator.world_size):
        rows += bencher.rows(problem)
        communicator.check_peers()
        if communicator.rank == 0:
            sys.stderr.write(f"  {problem}\n")
            sys.stderr.flush()
    if communicator.rank == 0:
        Path(result_file).write_text(json.dumps({"rows": rows, "left_out": bencher.left_out}), encoding="utf-8")
        if job["csv"]:
            _append_csv(Path(job["csv"]), rows)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
