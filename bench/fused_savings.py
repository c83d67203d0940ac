"""What two fused ops save, in CUDA graphs: norms that quantise, and the exchange of experts' tokens.

    torchrun --nproc-per-node 2 bench/fused_savings.py --csv bench/results/fused_savings.csv

Of every form, candidates with at most --blocks blocks are timed briefly; the fastest then takes turns with the others:

- `all_reduce_rms_norm` with a scale a row and with one for 128 columns, beside the norm that does not quantise
  (`plain`), beside a kernel of PyTorch's compiler that quantises (`quantise`), and beside both (`plain+quantise`);
- `ep_dispatch` and `ep_combine` (`fused`), beside two calls of `all_to_all_v` with PyTorch's permutations, compiled
  (`all_to_all_v`). Those move a token once for each of its experts, and the counts, which `all_to_all_v` wants on the
  host, are given to them.

Ranks may share a GPU under MPS, as bench/campaign.sh starts them: ratios between kernels are what that shows. Without a
GPU the kernels' defaults are interpreted once, which shows that results agree. Columns as in the other files of
bench/results.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from ranks import compile_all, finish, row_of, slowest, times_in_turn
from rows import arguments

from tunedcomm import kernels
from tunedcomm.dispatch.communicator import Communicator
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.errors import InfeasibleError
from tunedcomm.kernels.all_reduce_rms_norm.op import Form, form_of
from tunedcomm.kernels.all_reduce_rms_norm.op import finish as finish_form
from tunedcomm.kernels.all_to_all.op import layout_of
from tunedcomm.spec import Candidate, Problem, check_candidate, get_op, variants
from tunedcomm.tuner.gang.protocol import Latency
from tunedcomm.tuner.gang.ranks import join_group
from tunedcomm.tuner.measure.timing import TimedRun, make_run

Tensors: TypeAlias = tuple[torch.Tensor, ...]
Launch: TypeAlias = Callable[[Tensors, Tensors, int], None]
SEARCH_ROUNDS, SEARCH_CALLS = 5, 20
ROUNDS, CALLS = 60, 50
CONFIGS = 40  # of a variant, the default among them


class Case(NamedTuple):
    """A contender: what it is called with, and what its row says of it."""

    problem: Problem
    config: str
    launch: Launch
    inputs: Tensors = ()
    outputs: Tensors = ()


class Bench:
    """Binds and times launches on one rank's stream."""

    def __init__(self, communicator: Communicator, most_blocks: int) -> None:
        self.communicator, self.most_blocks = communicator, most_blocks
        on_gpu = communicator.device.type == "cuda"
        self.stream = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]
        self.rows: list[dict[str, Any]] = []

    def candidates(self, problem: Problem) -> list[Candidate]:
        """Some of every variant that runs in kernels."""
        found, shuffle = [], random.Random(str(problem))
        for name, variant in variants(problem.op).items():
            if not variant.waits_time_out or variant.is_library:
                continue
            default = variant.default_config(problem, self.communicator.limits)
            configs = list(variant.space.enumerate())
            shuffle.shuffle(configs)
            fit = [
                candidate
                for candidate in (Candidate.of(problem.op, name, config) for config in (default, *configs))
                if check_candidate(problem, candidate, self.communicator.limits) is None
                and 0 < variant.num_blocks(problem, candidate.config_dict) <= self.most_blocks
            ]
            found += list(dict.fromkeys(fit))[: CONFIGS if self.stream is not None else 1]
        return found

    def timed(self, case: Case, calls: int) -> TimedRun:
        """Something to time, after a first call."""
        with torch.cuda.stream(self.stream):
            case.launch(case.inputs, case.outputs, self.handle)
        self.wait()
        return make_run(case.launch, case.inputs, case.outputs, calls=calls, graph=True, stream=self.stream)

    @property
    def handle(self) -> int:
        return 0 if self.stream is None else self.stream.cuda_stream

    def wait(self) -> None:
        if self.stream is not None:
            torch.cuda.synchronize()
        self.communicator.check_peers()

    def best(self, problem: Problem, inputs: Tensors, outputs: Tensors) -> Case:
        """The fastest of the candidates."""
        candidates = self.candidates(problem)
        compile_all((problem, candidate) for candidate in candidates)
        cases = []
        for candidate in candidates:
            with suppress(InfeasibleError):
                launch = self.communicator.bind(problem, candidate)
                cases.append(Case(problem, str(candidate), launch, inputs, outputs))
        if self.stream is None:
            return cases[0]
        found = self.latencies(cases, SEARCH_CALLS, SEARCH_ROUNDS)
        times = [latency.p50_us for latency in found]
        return cases[times.index(min(times))]

    def latencies(self, cases: Sequence[Case], calls: int, rounds: int) -> list[Latency]:
        timed = [self.timed(case, calls) for case in cases]
        dist.barrier()
        found = slowest(times_in_turn(timed, rounds, self.stream))
        self.wait()
        return found

    def compare(self, cases: Mapping[str, Case]) -> None:
        """Time them in turn and keep their rows."""
        found = self.latencies([*cases.values()], *((1, 1) if self.stream is None else (CALLS, ROUNDS)))
        for (name, case), latency in zip(cases.items(), found, strict=True):
            self.rows.append(row_of(case.problem, name, case.config, latency))

    def run(self, *cases: Case) -> None:
        """Launch them once, one after another."""
        with torch.cuda.stream(self.stream):
            for case in cases:
                case.launch(case.inputs, case.outputs, self.handle)
        self.wait()


def compare_norms(bench: Bench, tokens: int, hidden: int) -> None:
    """The forms with scales of their own beside the plain one, and beside that with a kernel more."""
    device, ranks = bench.communicator.device, dist.get_world_size()
    plain = Problem("all_reduce_rms_norm", (tokens, hidden), "bfloat16", ranks, layout="residual")
    spec = get_op(plain.op)
    inputs = spec.make_inputs(plain, dist.get_rank(), 0, "random", device)
    outputs = spec.make_outputs(plain, device)
    basic = bench.best(plain, inputs, outputs)
    cases = {"plain": basic}
    for scaling in ("token", "group128"):
        problem = replace(plain, scaling=scaling)
        fused = bench.best(problem, inputs, spec.make_outputs(problem, device))
        compiled = torch.compile(partial(quantise, form_of(problem)), dynamic=False)

        def in_two(inputs: Tensors, outputs: Tensors, stream: int, compiled: Any = compiled) -> None:
            basic.launch(inputs, outputs, stream)
            compiled(outputs[0])

        bench.run(fused, basic)
        y, scales = compiled(outputs[0])
        again = y.float() * scales.repeat_interleave(hidden // scales.shape[1], 1)
        assert (again - outputs[0].float()).norm() <= 0.05 * outputs[0].float().norm(), "not what is compared"
        assert torch.allclose(scales, fused.outputs[2]), "the scales differ"
        cases[scaling] = fused
        alone = partial(lambda compiled, inputs, outputs, stream: compiled(outputs[0]), compiled)
        cases[f"quantise {scaling}"] = Case(problem, "", alone, outputs=outputs)
        cases[f"plain+quantise {scaling}"] = basic._replace(problem=problem, launch=in_two)
    bench.compare(cases)


def quantise(form: Form, y: torch.Tensor) -> Tensors:
    """(y in e4m3, scales) of a norm in the payload's dtype."""
    return finish_form(form, y.float(), y.dtype, None)[:2]


def pack(x: torch.Tensor, ids: torch.Tensor) -> Tensors:
    """A row for each expert of each token, sorted by expert, and where each row is."""
    flat = ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return x[order // ids.shape[1]], place


def weigh(results: torch.Tensor, place: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of the results of each token's experts."""
    parts = results[place].view(*weights.shape, -1)
    return (parts.float() * weights.unsqueeze(-1)).sum(1).to(results.dtype)


def compare_experts(bench: Bench, shape: tuple[int, int, int, int]) -> None:
    """Dispatch and combine beside all_to_all_v with permutations."""
    device, rank, ranks = bench.communicator.device, dist.get_rank(), dist.get_world_size()
    tokens, hidden, topk, experts = shape
    local = experts // ranks
    asked = Problem("ep_dispatch", shape, "bfloat16", ranks, reduction="", layout="padded")
    back = Problem("ep_combine", shape, "bfloat16", ranks, reduction="")
    inputs = get_op(asked.op).make_inputs(asked, rank, 0, "random", device)
    x = torch.randn(tokens, hidden, device=device).to(torch.bfloat16)
    ids, weights = inputs[1], torch.rand(tokens, topk, device=device)
    outputs = get_op(asked.op).make_outputs(asked, device)
    dispatch = bench.best(asked, (x, ids), outputs)
    bench.run(dispatch)
    y = torch.empty_like(x)
    combine = bench.best(back, (outputs[0].view(-1, hidden), weights, ids, outputs[4]), (y,))

    def fused(inputs: Tensors, outputs: Tensors, stream: int) -> None:
        dispatch.launch(dispatch.inputs, dispatch.outputs, stream)
        combine.launch(combine.inputs, combine.outputs, stream)

    every = [torch.empty_like(ids) for _ in range(ranks)]
    dist.all_gather(every, ids)
    counts = [[int((given // local == owner).sum()) for owner in range(ranks)] for given in every]
    send, recv = counts[rank], [given[rank] for given in counts]
    most = max(map(max, counts))
    moved = Problem(
        "all_to_all_v", (most * hidden,), "bfloat16", ranks, reduction="", layout=layout_of(2 * hidden, most)
    )
    # Rows come from all ranks, each rank's sorted by expert; the places that they go to are given, too.
    experts_of_rows = torch.cat([given[given // local == rank].sort()[0] for given in every])
    by_expert, order = experts_of_rows.sort(stable=True)
    target = torch.empty_like(order)
    capacity, number = outputs[0].shape[1], torch.arange(len(order), device=device)
    target[order] = (by_expert - rank * local) * capacity + number - torch.searchsorted(by_expert, by_expert)
    there, home = (torch.empty(sum(rows), hidden, dtype=x.dtype, device=device) for rows in (recv, send))
    spread, summed = torch.empty_like(outputs[0]).view(-1, hidden), torch.empty_like(y)
    sent, received = (torch.tensor([count * hidden for count in given]) for given in (send, recv))
    exchange = bench.best(moved, (home.clone(), sent, received), (there,))
    packed, weighed = torch.compile(pack, dynamic=False), torch.compile(weigh, dynamic=False)
    gathered = torch.compile(lambda rows, target: rows[target], dynamic=False)
    scattered = torch.compile(lambda rows, target, got: rows.index_copy_(0, target, got), dynamic=False)

    def in_parts(inputs: Tensors, outputs: Tensors, stream: int) -> None:
        rows, place = packed(x, ids)
        exchange.launch((rows, sent, received), (there,), stream)
        scattered(spread, target, there)
        exchange.launch((gathered(spread, target), received, sent), (home,), stream)
        summed.copy_(weighed(home, place, weights))

    cases = {
        "fused": Case(asked, f"{dispatch.config}, {combine.config}", fused),
        "all_to_all_v": Case(asked, exchange.config, in_parts),
    }
    bench.run(*cases.values())
    filled = target.sort()[0]
    assert torch.equal(spread[filled], outputs[0].view(-1, hidden)[filled]), "the permutations place tokens elsewhere"
    assert (summed - y).float().norm() <= 0.01 * y.float().norm(), "the permutations sum something else"
    bench.compare(cases)


def main() -> None:
    args = arguments(__doc__, tokens=[1, 2, 4, 8, 16, 32, 64, 128], hidden=8192, blocks=64, csv=None)
    join_group()
    kernels.discover()
    bench = Bench(get_communicator(), args.blocks)
    for tokens in args.tokens:
        torch.compiler.reset()  # a function of more than eight shapes is not compiled any more
        compare_norms(bench, tokens, args.hidden)
    compare_experts(bench, (64, 7 * args.hidden // 8, 8, 64))
    finish(bench.communicator, bench.rows, args.csv)


if __name__ == "__main__":
    main()
