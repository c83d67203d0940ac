"""Benchmark runs: a job of problems and contenders on several ranks of this machine.

`run_job` starts the ranks, each `python -m tunedcomm.bench.runner JOB RESULT`, and reads the lines of JSON that rank 0
writes to RESULT: `now`, what is measured from now on, or a problem's `rows` and the peers that were `left_out`.
All contenders of a problem run in one process and take turns, a replay (or an eager loop) each, in an order that
changes from round to round.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from tunedcomm import kernels
from tunedcomm.bench import nccl_symmetric
from tunedcomm.bench.contenders import Contender, Contenders, contenders_of, first_reason, load_adapter
from tunedcomm.bench.csv import add_ceiling_shares, append_rows
from tunedcomm.dispatch.communicator import Communicator
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.errors import TuningError
from tunedcomm.metrics import algbw_gb_s
from tunedcomm.ops.symmetric import symmetric_empty
from tunedcomm.peers import Tensors
from tunedcomm.spec import Problem, format_shape, get_op
from tunedcomm.state import clean_process
from tunedcomm.tuner.gang.ranks import join_group, run_module
from tunedcomm.tuner.measure import timing as measure

_ROUNDS, _HOST_ROUNDS = 25, 3
_ENVIRONMENT = ("gpu", "fabric", "torch", "triton", "nccl", "driver", "tunedcomm")
# Fused GEMMs of other projects signal for every tile.
_PEERS_SIGNAL_BYTES = 1 << 20


def run_job(
    job: Mapping[str, Any], world_size: int, borrow: Sequence[str] = (), *, on_line: Callable[[dict[str, Any]], None]
) -> None:
    """Run a job on new ranks; `on_line` gets each line of rank 0. A peer that is left out has shape, dtype, mode, why.

    Raises:
        TuningError: the ranks failed; their output on stderr says why.
    """
    with tempfile.TemporaryDirectory(prefix="tunedcomm-bench-") as folder:
        job_file, result_file = Path(folder, "job.json"), Path(folder, "result.json")
        job_file.write_text(json.dumps(job), encoding="utf-8")
        arguments = [str(job_file), str(result_file)]
        # A benchmark's calls do not count as misses.
        variables = {"TUNEDCOMM_MISS_LOG": "0", "TUNEDCOMM_BORROW": ",".join(borrow) or "no"}
        result_file.touch()
        with result_file.open("rb") as file:

            def read_lines() -> None:
                while (line := file.readline()).endswith(b"\n"):
                    on_line(json.loads(line))
                file.seek(-len(line), os.SEEK_CUR)  # a line that is being written is read again

            try:
                code = run_module(
                    "tunedcomm.bench.runner",
                    arguments,
                    world_size=world_size,
                    environment=variables,
                    on_wait=read_lines,
                )
            finally:  # after Ctrl-C, too
                read_lines()
        if code or not result_file.stat().st_size:
            raise TuningError(f"the benchmark's ranks ended with code {code}; what they printed above says why")


def _error(results: Tensors, references: Tensors) -> torch.Tensor:
    """‖out − ref‖ / ‖ref‖ of the worst output on this rank; a NaN counts as infinity."""
    worst = torch.zeros(1, dtype=torch.float64, device=references[0].device)
    for result, reference in zip(results, references, strict=True):
        difference = (result.reshape(-1).double() - reference.reshape(-1)).norm()
        worst = torch.maximum(worst, difference / reference.norm().clamp_min(1e-30))
    return worst.nan_to_num(nan=torch.inf, posinf=torch.inf)


class Bencher:
    """Runs the problems of a job on one rank."""

    def __init__(
        self, communicator: Communicator, job: Mapping[str, Any], say: Callable[[str], None] = lambda now: None
    ) -> None:
        self._communicator = communicator
        self._job, self._say = job, say
        self.left_out: list[dict[str, str]] = []
        self._adapters = [load_adapter(Path(path)) for path in job["peers"]]
        self._barrier = partial(dist.all_reduce, torch.zeros(1, dtype=torch.float32, device=communicator.device))
        on_gpu = communicator.device.type == "cuda"
        self._stream = torch.cuda.Stream(communicator.device) if on_gpu else None  # type: ignore[no-untyped-call]

    @clean_process()
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
        rows = [self._row(problem, *each) for each in zip(found.present, latencies, errors, strict=True)]
        place = {"shape": format_shape(problem.shape), "dtype": problem.dtype, "mode": problem.mode}
        self.left_out += [{**place, "peer": name, "why": why} for name, why in found.left_out]
        best: dict[str, dict[str, Any]] = {}
        for row in sorted(rows, key=lambda row: row["latency_p50_us"]):
            best.setdefault(row["contender"], row)
        add_ceiling_shares(list(best.values()), self._job["link_gb_s"])
        return list(best.values())

    def _check(self, problem: Problem, found: Contenders, values: Tensors, reference: Tensors) -> list[float]:
        """The errors of all contenders; removes peers that fail or are wrong."""
        kept: list[Contender] = []
        errors: list[float] = []
        for contender in found.present:
            self._say(f"{problem}: {contender.name}")
            contender.load(values)
            due = reference if contender.reference is None else contender.reference()
            if not contender.is_peer:
                contender.launch(contender.turns[0])  # binds the plans of both modes, and compiles
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
        """The worst error of a contender's launches, eager and replayed, and the reason to leave a peer out or ""."""
        most = get_op(problem.op).tolerance_of(problem)
        worst = 0.0
        # A graph may hold another kernel than an eager call.
        for graph in (False, True) if problem.mode == "graph" and self._stream is not None else (False,):
            reason: str | None = None
            error = torch.zeros(1, dtype=torch.float64, device=self._communicator.device)
            try:
                one = self._timed(problem, contender, 1, graph=graph)
                contender.load(values)
                one.run()
                if self._stream is not None:
                    self._stream.synchronize()
                error = _error(get_op(problem.op).mask_unspecified(problem, (), contender.results)[1], due)
            except Exception as raised:
                if not contender.is_peer:
                    raise
                first_line = (str(raised).splitlines() or [""])[0]
                reason = f"{'captured in a graph' if graph else 'run'}, it raised {type(raised).__name__}: {first_line}"
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
    ) -> measure.TimedRun:
        """A timed run of `calls` calls of the contender, captured where the problem's mode is `graph`."""
        first, *further = contender.turns
        graph = graph and problem.mode == "graph"
        return measure.make_run(
            contender.launch, first, (), calls=calls, graph=graph, stream=self._stream, further=further, lead=lead
        )

    def _probe_us(self, timed: measure.TimedRun) -> float:
        """The longest of two rounds on any rank."""
        times = measure.take_rounds(self._barrier, [timed], 2, self._stream)[0]
        slowest = torch.tensor([max(times)], dtype=torch.float32, device=self._communicator.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest.item())

    def _all_timed(self, problem: Problem, contenders: Sequence[Contender]) -> list[measure.TimedRun]:
        """Timed runs of all contenders; the first contender sets the launches a round, on the host each has its own."""
        if self._stream is None:
            return [self._timed_on_host(problem, contender) for contender in contenders]
        probe = self._timed(problem, contenders[0], 10)
        measure.take_rounds(self._barrier, [probe], 1, self._stream)
        calls = measure.calls_for(self._probe_us(probe))
        return [self._timed(problem, contender, calls) for contender in contenders]

    def _timed_on_host(self, problem: Problem, contender: Contender) -> measure.TimedRun:
        calls, lead = measure.calls_on_host(
            lambda calls, lead: self._probe_us(self._timed(problem, contender, calls, lead=lead))
        )
        return self._timed(problem, contender, calls, lead=lead)

    def _time(self, problem: Problem, contenders: Sequence[Contender], values: Tensors) -> list[Any]:
        """Latencies of all contenders; rounds begin with fresh inputs, since in-place sums grow with every launch."""
        self._say(f"{problem}: timing {len(contenders)} contenders in turn")
        timed = self._all_timed(problem, contenders)
        times: list[list[float]] = [[] for _ in timed]
        is_quick = self._stream is not None or all(one.lead for one in timed)
        for round_index in range(_ROUNDS if is_quick else _HOST_ROUNDS):
            for contender in contenders:
                contender.load(values)
            for index, new in enumerate(measure.take_rounds(self._barrier, timed, 1, self._stream, first=round_index)):
                times[index] += new
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, times)
        return [measure.summarise([by_rank[index] for by_rank in everyone]) for index in range(len(timed))]

    def _row(self, problem: Problem, contender: Contender, latency: Any, error: float) -> dict[str, Any]:
        spec, environment = get_op(problem.op), self._communicator.environment
        size = spec.message_bytes(problem)
        algbw = algbw_gb_s(spec.payload_bytes(size, problem.world_size), latency.p50_us)
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


def main(job_file: str, result_file: str) -> int:
    """Body of one rank; rank 0 writes the rows."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    device = join_group()
    kernels.discover()
    if job["peers"] and device.type == "cuda" and hasattr(symm_mem, "set_signal_pad_size"):  # torch 2.9 lacks it
        symm_mem.set_signal_pad_size(max(_PEERS_SIGNAL_BYTES, symm_mem.get_signal_pad_size()))
    communicator = get_communicator(None, device)
    problems = [Problem.from_dict(one) for one in job["problems"]]
    num_done = 0

    def write(**line: Any) -> None:
        if communicator.rank == 0:
            with Path(result_file).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    bencher = Bencher(communicator, job, lambda now: write(now=f"[{num_done + 1}/{len(problems)}] {now}"))
    for problem in problems:
        rows = bencher.rows(problem)
        communicator.check_peers()
        if communicator.rank == 0 and job["csv"]:
            append_rows(Path(job["csv"]), rows)
        write(rows=rows, left_out=bencher.left_out)
        bencher.left_out = []
        num_done += 1
    dist.barrier()
    nccl_symmetric.release()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
