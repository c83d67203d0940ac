"""Benchmark runs: a job of problems and contenders on several ranks of this machine.

`run_job` starts the ranks, each `python -m tunedcomm.bench.runner JOB RESULT`, and returns what rank 0 writes. All
contenders of a problem run in one process and interleaved, a replay (or an eager loop) each in turn, in an order that
changes from round to round.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from tunedcomm import kernels
from tunedcomm.bench.contenders import Contender, Contenders, contenders_of, first_reason, load_adapter
from tunedcomm.bench.csv import add_ceiling_shares, append_rows
from tunedcomm.dispatch.communicator import Communicator, get_communicator
from tunedcomm.errors import TuningError
from tunedcomm.hardware import gpu_of, num_gpu_ranks
from tunedcomm.metrics import algbw_gb_s, payload_bytes
from tunedcomm.ops.symmetric import symmetric_empty
from tunedcomm.peers import Tensors
from tunedcomm.spec import Problem, format_shape, get_op
from tunedcomm.tuner.measure import timing as measure

_ROUNDS, _HOST_ROUNDS = 25, 3
_POLL_S = 0.05
_ENVIRONMENT = ("gpu", "fabric", "torch", "triton", "nccl", "driver", "tunedcomm")
# Fused GEMMs of other projects signal for every tile.
_PEERS_SIGNAL_BYTES = 1 << 20


def run_module(
    module: str, arguments: Sequence[str], *, world_size: int, environment: Mapping[str, str] | None = None
) -> int:
    """Run `python -m module arguments` on `world_size` ranks; their output goes to stderr.

    Returns 0 if every rank ended with 0, else the exit code of the first one that did not; the others are killed then.
    """
    variables = {**os.environ, **(environment or {})}
    if num_gpu_ranks() < 2:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    variables.setdefault("OMP_NUM_THREADS", "1")
    # Ranks of one host must not meet under a name that resolves to an address nobody answers.
    variables.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with socket.create_server(("127.0.0.1", 0)) as free:
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    variables |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    command, ranks = [sys.executable, "-m", module, *arguments], list[subprocess.Popen[bytes]]()
    try:
        for rank in map(str, range(world_size)):
            its = {**variables, "RANK": rank, "LOCAL_RANK": rank}
            ranks.append(subprocess.Popen(command, env=its, stdout=sys.stderr))
        while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
            time.sleep(_POLL_S)
        return next(filter(None, codes), 0)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def run_job(job: Mapping[str, Any], world_size: int, borrow: Sequence[str] = ()) -> dict[str, list[dict[str, Any]]]:
    """Run a job on new ranks; returns `rows`, and the peers that were `left_out`, each with shape, dtype, mode and why.

    Raises:
        TuningError: the ranks failed; what they printed on stderr says why.
    """
    with tempfile.TemporaryDirectory(prefix="tunedcomm-bench-") as folder:
        job_file, result_file = Path(folder, "job.json"), Path(folder, "result.json")
        job_file.write_text(json.dumps(job), encoding="utf-8")
        arguments = [str(job_file), str(result_file)]
        # A benchmark's calls are nothing that a user misses.
        variables = {"TUNEDCOMM_MISS_LOG": "0", "TUNEDCOMM_BORROW": ",".join(borrow)}
        code = run_module("tunedcomm.bench.runner", arguments, world_size=world_size, environment=variables)
        if code or not result_file.exists():
            raise TuningError(f"the benchmark's ranks ended with code {code}; what they printed above says why")
        found: dict[str, list[dict[str, Any]]] = json.loads(result_file.read_text(encoding="utf-8"))
        return found


def _error(results: Tensors, references: Tensors) -> torch.Tensor:
    """‖out − ref‖ / ‖ref‖ of the worst output on this rank; a NaN counts as infinite."""
    worst = torch.zeros(1, dtype=torch.float64, device=references[0].device)
    for result, reference in zip(results, references, strict=True):
        difference = (result.reshape(-1).double() - reference.reshape(-1)).norm()
        worst = torch.maximum(worst, difference / reference.norm().clamp_min(1e-30))
    return worst.nan_to_num(nan=torch.inf, posinf=torch.inf)


class Bencher:
    """Runs the problems of a job on one rank."""

    def __init__(self, communicator: Communicator, job: Mapping[str, Any]) -> None:
        self._communicator = communicator
        self._job = job
        self.left_out: list[dict[str, str]] = []
        self._adapters = [load_adapter(Path(path)) for path in job["peers"]]
        self._barrier = partial(dist.all_reduce, torch.zeros(1, device=communicator.device))
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
        seed, kind = self._job["seed"], self._job["inputs"]
        everyone = [spec.make_inputs(problem, rank, seed, kind, device) for rank in ranks]
        values = everyone[self._communicator.rank]
        reference = spec.reference(problem, everyone, self._communicator.rank)
        del everyone
        inputs: Tensors = tuple(torch.empty_like(value) for value in values)
        if problem.input_kind == "symmetric":  # the first is what peers read
            inputs = (symmetric_empty(values[0].shape, dtype=values[0].dtype, device=device), *inputs[1:])
        found = contenders_of(self._communicator, problem, inputs, self._job["contenders"], self._adapters)
        errors = self._check(problem, found, values, reference)
        del reference
        latencies = self._time(problem, found.present, values)
        rows = list(map(self._row, itertools.repeat(problem), found.present, latencies, errors))
        place = {"shape": format_shape(problem.shape), "dtype": problem.dtype, "mode": problem.mode}
        self.left_out += [{**place, "peer": name, "why": why} for name, why in found.left_out]
        best: dict[str, dict[str, Any]] = {}
        for row in sorted(rows, key=lambda row: row["latency_p50_us"]):
            best.setdefault(row["contender"], row)
        add_ceiling_shares(list(best.values()), self._job["link_gb_s"])
        return list(best.values())

    def _check(self, problem: Problem, found: Contenders, values: Tensors, reference: Tensors) -> list[float]:
        """The errors of all contenders; peers that fail or are wrong are left out from here on."""
        kept: list[Contender] = []
        errors: list[float] = []
        for contender in found.present:
            contender.load(values)
            due = reference if contender.reference is None else contender.reference()
            if not contender.is_peer:
                contender.launch(contender.turns[0])  # binds plans of both modes, compiles what compiles late
            error, reason = self._try(problem, contender, values, due)
            if reason:
                setting = f" ({contender.config})" if contender.config else ""
                found.left_out.append((contender.name, f"{reason}{setting}"))
            else:
                kept.append(contender)
                errors.append(error)
        found.present = kept
        return errors

    def _try(self, problem: Problem, contender: Contender, values: Tensors, due: Tensors) -> tuple[float, str]:
        """The worst error of its launches, eager and replayed, and the reason to leave a peer out or ""."""
        most = get_op(problem.op).tolerance_of(problem)
        worst = 0.0
        # What a graph holds may be another kernel than a call.
        for graph in (False, True) if problem.mode == "graph" and self._stream is not None else (False,):
            reason: str | None = None
            error = torch.zeros(1, dtype=torch.float64, device=self._communicator.device)
            try:
                one = self._timed(problem, contender, 1, graph=graph)
                contender.load(values)
                one.run()
                if self._stream is not None:
                    self._stream.synchronize()
                error = _error(get_op(problem.op).cleared(problem, (), contender.results)[1], due)
            except Exception as raised:
                if not contender.is_peer:
                    raise
                told = (str(raised).splitlines() or [""])[0]
                reason = f"{'captured in a graph' if graph else 'run'}, it raised {type(raised).__name__}: {told}"
            if contender.is_peer:
                reason = first_reason(reason)
            if reason is None:
                dist.all_reduce(error, dist.ReduceOp.MAX)
                worst = max(worst, float(error.item()))
                if contender.is_peer and worst > most:
                    how = "replayed from a graph" if graph else "launched"
                    reason = f"wrong when {how}: its error is {worst:.1e}, at most {most:.1e} is right"
            if reason is not None:
                return worst, reason
        return worst, ""

    def _timed(
        self, problem: Problem, contender: Contender, calls: int, *, graph: bool = True, lead: bool = False
    ) -> measure.Contender:
        """Something to time: so many calls of the contender, captured where the problem's mode says so."""
        first, *further = contender.turns
        graph = graph and problem.mode == "graph"
        return measure.contend(
            contender.launch, first, (), calls=calls, graph=graph, stream=self._stream, further=further, lead=lead
        )

    def _probe_us(self, timed: measure.Contender) -> float:
        """The longest of two rounds on any rank."""
        mine = measure.take_rounds(self._barrier, [timed], 2, self._stream)[0]
        slowest = torch.tensor([max(mine)], device=self._communicator.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest.item())

    def _all_timed(self, problem: Problem, contenders: Sequence[Contender]) -> list[measure.Contender]:
        """The contenders with as many launches a round as the first one needs, on the host each for itself."""
        if self._stream is None:
            return [self._timed_on_host(problem, contender) for contender in contenders]
        probe = self._timed(problem, contenders[0], 10)
        measure.take_rounds(self._barrier, [probe], 1, self._stream)
        calls = measure.calls_for(self._probe_us(probe))
        return [self._timed(problem, contender, calls) for contender in contenders]

    def _timed_on_host(self, problem: Problem, contender: Contender) -> measure.Contender:
        calls, lead = measure.calls_on_host(
            lambda calls, lead: self._probe_us(self._timed(problem, contender, calls, lead=lead))
        )
        return self._timed(problem, contender, calls, lead=lead)

    def _time(self, problem: Problem, contenders: Sequence[Contender], values: Tensors) -> list[Any]:
        """Latencies, of rounds of all; inputs are restored in between, since in place they grow with every launch."""
        timed = self._all_timed(problem, contenders)
        times: list[list[float]] = [[] for _ in timed]
        is_quick = self._stream is not None or all(one.lead for one in timed)
        for number in range(_ROUNDS if is_quick else _HOST_ROUNDS):
            for contender in contenders:
                contender.load(values)
            for index, new in enumerate(measure.take_rounds(self._barrier, timed, 1, self._stream, first=number)):
                times[index] += new
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, times)
        return [measure.summarise([by_rank[index] for by_rank in everyone]) for index in range(len(timed))]

    def _row(self, problem: Problem, contender: Contender, latency: Any, error: float) -> dict[str, Any]:
        spec, environment = get_op(problem.op), self._communicator.environment
        size = spec.message_bytes(problem)
        algbw = algbw_gb_s(payload_bytes(problem.op, size, problem.world_size), latency.p50_us)
        factor = spec.busbw_factor(problem.world_size) if spec.busbw_factor else None
        return {
            "op": problem.op,
            "shape": format_shape(problem.shape),
            "message_bytes": size,
            **{name: getattr(problem, name) for name in ("dtype", "world_size", "mode")},
            "contender": contender.name,
            "config": contender.config,
            **{f"latency_{name}": round(getattr(latency, name), 3) for name in ("p10_us", "p50_us", "p90_us")},
            "algbw_gb_s": round(algbw, 3),
            "busbw_gb_s": round(algbw * factor, 3) if factor is not None else None,
            "num_sms": None if contender.num_sms is None else min(contender.num_sms, environment.num_sms),
            "error": float(f"{error:.3e}"),
            **{name: getattr(environment, name) for name in _ENVIRONMENT},
            "command": self._job["command"],
            "run_id": self._job["run_id"],
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **{name: getattr(problem, name) for name in ("input_kind", "in_place", "reduction", "layout", "scaling")},
            "ceiling_share": None,
        }


def start_group() -> torch.device:
    """Join the default group of a launcher's ranks; returns this rank's device."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = gpu_of(int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def main(job_file: str, result_file: str) -> int:
    """Body of one rank; rank 0 writes the rows."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    device = start_group()
    kernels.discover()
    if job["peers"] and device.type == "cuda" and hasattr(symm_mem, "set_signal_pad_size"):  # torch 2.9 lacks it
        symm_mem.set_signal_pad_size(max(_PEERS_SIGNAL_BYTES, symm_mem.get_signal_pad_size()))
    communicator = get_communicator(None, device)
    bencher = Bencher(communicator, job)
    rows: list[dict[str, Any]] = []
    for problem in map(Problem.from_dict, job["problems"]):
        rows += bencher.rows(problem)
        communicator.check_peers()
        if communicator.rank == 0:
            sys.stderr.write(f"  {problem}\n")
            sys.stderr.flush()
    if communicator.rank == 0:
        Path(result_file).write_text(json.dumps({"rows": rows, "left_out": bencher.left_out}), encoding="utf-8")
        if job["csv"]:
            append_rows(Path(job["csv"]), rows)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
