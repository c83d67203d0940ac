"""What a benchmark runs on one problem: dispatch, the library, the variants, the GEMM alone, and other projects."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from tunedcomm import kernels
from tunedcomm.cli import _gemm_alone as gemm_alone
from tunedcomm.cli._peer_files import Adapter
from tunedcomm.cli._peers import TORCH_PEERS
from tunedcomm.dispatch.communicator import Communicator
from tunedcomm.dispatch.dispatcher import decide
from tunedcomm.errors import InfeasibleError
from tunedcomm.peers import LeftOut, Peer, Tensors
from tunedcomm.spec import Candidate, Problem, check_candidate, get_op, get_variant, variants
from tunedcomm.tuner.measure import further_turns, num_turns

__all__ = ["Entrant", "Field", "Tensors", "agreed", "entrants_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Entrant:
    """A contender before it is captured.

    Attributes:
        name, config: columns of the row.
        num_sms: blocks it occupies, None where that is not known.
        turns: inputs that launches take in turn.
        load: puts values into all of them.
        run: one launch with one of them on the current stream.
        result: where its results are.
        reference: what its results should be, where that is not what the op's should.
        is_peer: somebody else's, which is left out where it fails.
    """

    name: str
    config: str
    num_sms: int | None
    turns: tuple[Tensors, ...]
    load: Callable[[Tensors], None]
    run: Callable[[Tensors], None]
    result: Callable[[], Tensors]
    reference: Callable[[], Tensors] | None = None
    is_peer: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """Who takes part, and (contender, why not) of the peers who do not."""

    entrants: list[Entrant]
    left_out: list[tuple[str, str]]


def agreed(reason: str | None) -> str | None:
    """What is wrong with a peer on some rank, the same on every rank; None where nothing is."""
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    return next((found for found in reasons if found is not None), None)


def _loader(turns: Sequence[Tensors]) -> Callable[[Tensors], None]:
    def load(values: Tensors) -> None:
        for targets in turns:
            for target, value in zip(targets, values, strict=True):
                target.copy_(value)

    return load


def _turns(problem: Problem, inputs: Tensors) -> tuple[Tensors, ...]:
    """The inputs, and what launches take in turn with them."""
    return inputs, *further_turns(inputs, cold=get_op(problem.op).cold and problem.input_kind == "plain")


def _outputs(problem: Problem, inputs: Tensors) -> Tensors:
    return inputs if problem.in_place else get_op(problem.op).make_outputs(problem, inputs[0].device)


def _tuned(communicator: Communicator, problem: Problem, turns: tuple[Tensors, ...]) -> Entrant:
    """What a user's call runs, through the public function."""
    decision = decide(problem, communicator.snapshot, communicator.limits)
    variant = get_variant(problem.op, decision.candidate.variant)
    blocks = variant.num_blocks(problem, decision.candidate.config_dict)
    outputs = _outputs(problem, turns[0])
    public = importlib.import_module(f"tunedcomm.ops.{problem.op}").run_problem

    def run(inputs: Tensors) -> None:
        public(problem, inputs, outputs)

    sms = blocks if blocks >= 0 else None
    return Entrant("tuned", str(decision.candidate), sms, turns, _loader(turns), run, lambda: outputs)


def _library(communicator: Communicator, problem: Problem, turns: tuple[Tensors, ...]) -> Entrant:
    """NCCL (gloo) on memory of its own; in place where the op may be, the form that needs no copy."""
    in_place = get_op(problem.op).in_place
    asked = replace(problem, in_place=in_place, input_kind="plain")
    own: tuple[Tensors, ...] = turns
    if not get_op(problem.op).cold:
        own = (tuple(torch.empty_like(x) for x in turns[0]),)
    outputs = _outputs(asked, own[0])
    launch = communicator.bind(asked, Candidate.of(problem.op, "library", {}))

    def run(inputs: Tensors) -> None:
        launch(inputs, outputs, torch.cuda.current_stream().cuda_stream if inputs[0].is_cuda else 0)

    return Entrant("library", "in place" if in_place else "", None, own, _loader(own), run, lambda: outputs)


def _candidates_of(communicator: Communicator, problem: Problem, name: str) -> list[Candidate]:
    """The variant's stored candidates for the problem, best first, then its default; those that may run."""
    rows = [r for r in communicator.snapshot.family_rows(problem) if r.problem == problem]
    rows = [
        r for r in rows if r.candidate.variant == name and r.source_hash == kernels.source_hash(_variant(problem, name))
    ]
    rows.sort(key=lambda row: row.latency_p50_us)
    found = [row.candidate for row in rows]
    found.append(Candidate.of(problem.op, name, _variant(problem, name).default_config(problem, communicator.limits)))
    return [c for c in found if check_candidate(problem, c, communicator.limits) is None]


def _variant(problem: Problem, name: str) -> Any:
    return get_variant(problem.op, name)


def _named(communicator: Communicator, problem: Problem, name: str, turns: tuple[Tensors, ...]) -> Entrant | None:
    for candidate in _candidates_of(communicator, problem, name):
        try:
            launch = communicator.bind(problem, candidate)
            break
        except InfeasibleError:  # its binary takes more of an SM than its variant thought
            continue
    else:
        return None
    outputs = _outputs(problem, turns[0])
    blocks = _variant(problem, name).num_blocks(problem, candidate.config_dict)

    def run(inputs: Tensors) -> None:
        launch(inputs, outputs, torch.cuda.current_stream().cuda_stream if inputs[0].is_cuda else 0)

    sms = blocks if blocks >= 0 else None
    return Entrant(name, str(candidate), sms, turns, _loader(turns), run, lambda: outputs)


def _of_peer(name: str, peer: Peer, count: int) -> Entrant:
    turns = tuple(peer.allocate() for _ in range(count))
    results: list[Tensors] = [()]

    def run(inputs: Tensors) -> None:
        results[0] = peer.run(inputs)

    return Entrant(name, peer.config, peer.num_sms, turns, _loader(turns), run, lambda: results[0], is_peer=True)


def _add_peers(field: Field, adapter: Adapter, problem: Problem, device: torch.device, count: int) -> None:
    """Its settings for the problem, if all ranks have the same, else why not."""
    made: list[Entrant] = []
    reason: str | None = None
    try:
        made = [_of_peer(adapter.name, peer, count) for peer in adapter.peers(problem, device)]
    except LeftOut as why:
        reason = str(why)
    except ModuleNotFoundError as error:
        reason = f"{error.name} cannot be imported here"
    except Exception as error:  # noqa: BLE001 - other people's code; what it raises is the reason
        reason = f"it raised {type(error).__name__}: {error}"
    reason = agreed(reason)
    if reason is not None:
        field.left_out.append((adapter.name, reason))
        return
    settings: list[Any] = [None] * problem.world_size
    dist.all_gather_object(settings, [entrant.config for entrant in made])
    if any(other != settings[0] for other in settings):
        field.left_out.append((adapter.name, f"its settings differ from rank to rank: {settings}"))
        return
    field.entrants.extend(made)


def _cublas(problem: Problem, turns: tuple[Tensors, ...]) -> Entrant:
    """The GEMM alone, on what is gathered already and without the sum over ranks; judged by its own reference."""
    held = tuple(gemm_alone.inputs_of(problem, inputs) for inputs in turns)
    out = gemm_alone.output_of(problem, held[0])

    def load(values: Tensors) -> None:
        whole = gemm_alone.inputs_of(problem, values)
        for targets in held:
            for target, value in zip(targets, whole, strict=True):
                target.copy_(value)

    def run(inputs: Tensors) -> None:
        gemm_alone.run(problem, inputs, out)

    return Entrant(
        gemm_alone.NAME, "", None, held, load, run, lambda: (out,), lambda: gemm_alone.reference(problem, held[0])
    )


def entrants_of(
    communicator: Communicator,
    problem: Problem,
    inputs: Tensors,
    wanted: Callable[[str], bool],
    adapters: Sequence[Adapter] = (),
) -> Field:
    """All that can run `problem` and are wanted, the library first; several of one name are its settings."""
    turns = _turns(problem, inputs)
    found = [_library(communicator, problem, turns)]
    if wanted("tuned"):
        found.append(_tuned(communicator, problem, turns))
    for name in variants(problem.op):
        if name != "library" and wanted(name):
            entrant = _named(communicator, problem, name, turns)
            found += [entrant] if entrant is not None else []
    if gemm_alone.suits(problem) and wanted(gemm_alone.NAME):
        found.append(_cublas(problem, turns))
    field = Field(found, [])
    count = num_turns(inputs, cold=get_op(problem.op).cold)
    for adapter in (*TORCH_PEERS, *adapters):
        if wanted(adapter.name):
            _add_peers(field, adapter, problem, communicator.device, count)
    return field
