"""Time ep_dispatch with ep_combine in CUDA graphs: both together, and each alone.

    torchrun --nproc-per-node 2 bench/experts.py --tokens 1 16 64 128 1024 4096 --peers bench/peers/flashinfer.py

For each number of tokens a rank and kind (layout `tokens`, the same in buffers, layout `contiguous` with sums of each
rank's experts): the defaults of the variants, and with --configs other grids around them. In the last kind weights
travel along. The exchanges of --peers (bench/peers/flashinfer.py, bench/peers/deepep.py) take turns with each fastest
pair. Both deliver tokens unsorted, FlashInfer's in its workspace, where it reads results too, DeepEP's in new tensors.
Calls of a graph take turns over two slots, as a program's layers do. Routing is random: --topk of --experts. With
--num-tokens 64 the layout `tokens` also runs with 64 tokens in use of each larger number; the last column divides by
the time of 64 tokens alone. The slowest rank's median counts. Prints the fastest of each variant and both together.
"""

from __future__ import annotations

import itertools
import runpy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from ranks import compile_all, finish, row_of, slowest, times_in_turn
from rows import arguments

from tunedcomm import kernels
from tunedcomm.dispatch.communicator import Communicator
from tunedcomm.dispatch.decide import decide
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.errors import InfeasibleError
from tunedcomm.ops.symmetric import symmetric_empty
from tunedcomm.spec import Candidate, Problem, check_candidate, get_op, get_variant
from tunedcomm.tuner.gang.ranks import join_group
from tunedcomm.tuner.measure import timing

CALLS, ROUNDS = 10, 15
BY_TOKEN = ("tokens_lamport", "tokens_push")
# Kind to layout and variants of the dispatch, then of the combine.
KINDS = {
    "plain": (("tokens", BY_TOKEN), ("tokens", BY_TOKEN)),
    "buffers": (
        ("tokens", ("tokens_lamport", "tokens_direct")),
        ("tokens", ("tokens_lamport", "tokens_pull", "tokens_push")),
    ),
    "contiguous": (("contiguous", ("lamport", "push", "two_phase")), ("rank", BY_TOKEN)),
}
AXES: dict[str, tuple[Any, ...]] = {
    "num_blocks": (16, 32, 64, 128, 256), "num_warps": (2, 4, 8, 16), "split": (1, 2, 4, 8), "items": (1, 2, 4),
    "chunk_tokens": (64, 256, 1024),
}  # fmt: skip


def candidates_of(problem: Problem, communicator: Communicator, name: str, *, more: bool) -> Iterator[Candidate]:
    """The default of a variant and what is tuned; with `more` what differs in one axis, or in blocks and warps."""
    variant = get_variant(problem.op, name)
    default = variant.default(problem, communicator.limits)
    configs = [default]
    tuned = decide(problem, communicator.snapshot, communicator.limits).candidate
    if tuned.variant == name:
        configs.append(tuned.config_dict)
    if more:
        axes = [axis for axis in variant.space.names if axis in AXES]
        for one, other in itertools.combinations(axes, 2):
            for first, second in itertools.product(AXES[one], AXES[other]):
                config = {**default, one: first, other: second}
                near = sum(config[axis] != default[axis] for axis in axes)
                if near == 1 or (near == 2 and {one, other} <= {"num_blocks", "num_warps", "split", "items"}):
                    configs.append(config)
    seen = dict.fromkeys(Candidate.of(problem.op, name, config) for config in configs)
    yield from (each for each in seen if check_candidate(problem, each, communicator.limits) is None)


def prepared(communicator: Communicator, problem: Problem) -> tuple[list[Any], list[Any]]:
    """Inputs and outputs of two turns; symmetric ones where the problem has them."""
    spec, device = get_op(problem.op), communicator.device
    made_inputs, made_outputs = [], []
    for turn in range(2):
        inputs = spec.make_inputs(problem, communicator.rank, turn, "random", device)
        outputs = spec.make_outputs(problem, device)
        if problem.input_kind == "symmetric" and problem.op == "ep_dispatch":
            outputs = tuple(symmetric_empty(each.shape, dtype=each.dtype, device=device) for each in outputs)
        elif problem.input_kind == "symmetric":
            first = symmetric_empty(inputs[0].shape, dtype=inputs[0].dtype, device=device)
            inputs = (first.copy_(inputs[0]), *inputs[1:])
        made_inputs.append(inputs)
        made_outputs.append(outputs)
    return made_inputs, made_outputs


def weighted(problem: Problem, inputs: list[Any], outputs: list[Any]) -> tuple[list[Any], list[Any]]:
    """The same of a dispatch with weights."""
    size, topk, device = problem.shape[0], problem.shape[2], outputs[0][0].device
    given = torch.rand(size, topk, dtype=torch.float32, device=device)
    come = torch.empty(problem.world_size, size, topk, dtype=torch.float32, device=device)
    return [(*each, given) for each in inputs], [(*each[:5], come) for each in outputs]


def with_number(problem: Problem, number: int, inputs: list[Any], outputs: list[Any]) -> tuple[list[Any], list[Any]]:
    """The same where every rank has so many tokens: the kernels read the number on the device."""
    device = outputs[0][0].device
    limits = torch.tensor([number, number], dtype=torch.int32, device=device)
    if problem.op == "ep_dispatch":
        return [(*each, limits[:1].clone()) for each in inputs], [(*each, limits.clone()) for each in outputs]
    for _, held, _ in inputs:
        held.view(problem.world_size, problem.shape[0], -1)[:, number:] = -1
    return [(*each, limits) for each in inputs], outputs


def by_peer(
    adapter: dict[str, Any], problem: Problem, communicator: Communicator, stream: torch.cuda.Stream
) -> Callable[[int], None]:
    """Another project's dispatch and combine of such tokens, ids and weights."""
    by_token = replace(problem, layout="tokens", input_kind="plain")
    inputs, _ = prepared(communicator, by_token)
    pair = adapter["experts_pair"](by_token, communicator.device)
    given = [(x, ids.to(adapter["IDS"]), weights.contiguous()) for x, ids, weights in inputs]

    def call(turn: int) -> None:
        with torch.cuda.stream(stream):
            pair(given[turn % 2])

    return call


def main() -> None:
    """Measure."""
    options = arguments(
        __doc__,
        tokens=[1, 16, 64, 128, 1024, 4096],
        hidden=7168,
        topk=8,
        experts=256,
        configs=False,
        peers=[],
        num_tokens=0,
        csv=None,
    )
    device = join_group()
    kernels.discover()
    communicator = get_communicator(None, device)
    stream = torch.cuda.Stream(device)
    adapters = [runpy.run_path(path) for path in options.peers]
    rows: list[dict[str, Any]] = []
    alone: dict[str, float] = {}  # kind to both together, of --num-tokens tokens without others
    for count, kind, number in itertools.product(options.tokens, KINDS, sorted({0, options.num_tokens})):
        if number and (number >= count or kind == "contiguous"):
            continue
        named = f"{kind}, {number} used" if number else kind
        shape = (count, options.hidden, options.topk, options.experts)
        problems: dict[str, Problem] = {}
        calls: dict[str, list[tuple[Candidate, Callable[[int], None]]]] = {}
        for op, (layout, names) in zip(("ep_dispatch", "ep_combine"), KINDS[kind], strict=True):
            problem = Problem(op, shape, "bfloat16", communicator.world_size, reduction="", layout=layout)
            problem = replace(problem, input_kind="symmetric" if kind == "buffers" else "plain")
            inputs, outputs = prepared(communicator, problem)
            chosen = [
                candidate
                for name in names
                for candidate in candidates_of(problem, communicator, name, more=options.configs)
            ]
            compile_all((problem, candidate) for candidate in chosen)
            problems[op], calls[op] = problem, []
            for candidate in chosen:
                try:
                    launch = communicator.bind(problem, candidate)
                except InfeasibleError:
                    continue
                given = with_number(problem, number, inputs, outputs) if number else (inputs, outputs)
                if layout == "contiguous":
                    given = weighted(problem, inputs, outputs)

                def call(turn: int, launch: Any = launch, given: tuple[list[Any], list[Any]] = given) -> None:
                    launch(given[0][turn % 2], given[1][turn % 2], stream.cuda_stream)

                calls[op].append((candidate, call))

        def timed(*steps: Callable[[int], None]) -> timing.TimedRun:
            with torch.cuda.stream(stream):
                for turn, step in itertools.product(range(2), steps):
                    step(turn)
            stream.synchronize()

            def run() -> None:
                for turn, step in itertools.product(range(CALLS), steps):
                    step(turn)

            return timing.TimedRun(timing.capture(run, stream).replay, CALLS, eager=False)

        fastest: dict[str, tuple[float, Candidate, Callable[[int], None]]] = {}
        for op, several in calls.items():
            latencies = slowest(times_in_turn([timed(call) for _, call in several], ROUNDS, stream))
            for (candidate, call), latency in zip(several, latencies, strict=True):
                rows.append(row_of(problems[op], named, str(candidate), latency))
                for key in (op, f"{op} {candidate.variant}"):
                    if key not in fastest or latency.p50_us < fastest[key][0]:
                        fastest[key] = latency.p50_us, candidate, call
        pair = [fastest[op][2] for op in calls]
        contenders = {"both": timed(*pair)}
        for adapter in adapters if not number else ():
            contenders[adapter["NAME"]] = timed(by_peer(adapter, problems["ep_dispatch"], communicator, stream))
        together = slowest(times_in_turn(list(contenders.values()), ROUNDS, stream))
        for name, latency in zip(contenders, together, strict=True):
            rows.append(row_of(problems["ep_combine"], f"{named} {name}", "", latency))
        if communicator.rank == 0:
            for key, (us, candidate, _) in fastest.items():
                print(f"{count:5} {named:19} {key:30} {us:9.2f} us {candidate}")
            for name, latency in zip(contenders, together, strict=True):
                beside = f" x {latency.p50_us / alone[kind]:.2f}" if number and kind in alone else ""
                print(f"{count:5} {named:19} {name:30} {latency.p50_us:9.2f} us{beside}", flush=True)
        if count == options.num_tokens:
            alone[kind] = together[0].p50_us
    communicator.check_peers()
    finish(communicator, rows, options.csv)


if __name__ == "__main__":
    main()
