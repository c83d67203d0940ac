"""all_gather: every rank gets all ranks' inputs, one after another in rank order.

Base class of its variants, `library` and `host_one_shot`, all with numerics ordered: bits are moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tunedcomm.fp8 import WIRES
from tunedcomm.kernels.common.feasibility import Launch, refuse_result
from tunedcomm.kernels.common.host import HostStage, HostVariant
from tunedcomm.kernels.common.reference import draw_any, rank_hidden_states, register_move
from tunedcomm.kernels.common.variant import LibraryVariant, MoveVariant, Workspace, all_gather_single
from tunedcomm.space import Config
from tunedcomm.spec import Limits, Problem

if TYPE_CHECKING:
    import torch

# Packets of all ranks that a thread and a block take at once: with more, registers spill.
_MAX_PACKETS, _MAX_PACKETS_A_BLOCK = 16, 4096


def _make_inputs(problem: Problem, rank: int, seed: int, kind: str, device: Any) -> tuple[torch.Tensor]:
    return (draw_any(problem, problem.numel, rank, seed, kind, device),)


def _received(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> torch.Tensor:
    import torch

    del problem, rank
    dtype = inputs[0][0].dtype
    return torch.cat([values.view(torch.uint8) for (values,) in inputs]).view(dtype)


ALL_GATHER = register_move(
    "all_gather",
    "every rank gets all ranks' inputs, one after another in rank order",
    shape_help="number of elements of one rank's input, e.g. 98304",
    make_inputs=_make_inputs,
    received=_received,
    largest_mib=128,
    scalings=("", *WIRES),
    model_shapes=rank_hidden_states,
)


class AllGatherVariant(MoveVariant):
    op = "all_gather"

    def refuse(self, problem: Problem, limits: Limits) -> str | None:
        return refuse_result(problem) or super().refuse(problem, limits)

    def refuse_items(self, problem: Problem, config: Config) -> str | None:
        """Return why a thread cannot hold the packets of all ranks that `config` gives it at once, or None."""
        packets, threads = int(config["items"]) * problem.world_size, 32 * int(config["num_warps"])
        if packets > _MAX_PACKETS or packets * threads > _MAX_PACKETS_A_BLOCK:
            return f"{packets} packets in each of {threads} threads at once spill registers"
        return None


class Library(LibraryVariant, registered=True):
    """NCCL (gloo on CPUs). Dtypes that the backend does not know travel as bytes. Graph-safe on NCCL."""

    op = "all_gather"
    numerics = "ordered"  # nothing is computed

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch

        group, gather = workspace.group, all_gather_single()
        known = {getattr(torch, name) for name in self.named_dtypes}

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            x, out = inputs[0], outputs[0]
            if x.dtype in known and x.is_cuda:
                gather(out, x, group=group)
            elif x.dtype in known:  # gloo cuts the output along its first dimension
                gather(out.view(-1), x.view(-1), group=group)
            else:
                gather(out.view(-1).view(torch.uint8), x.view(-1).view(torch.uint8), group=group)

        return run


class HostOneShot(HostVariant, registered=True):
    """A pass through the ring of slots in shared memory (`symm.ring`): every rank copies what its peers published."""

    op = "all_gather"
    name = "host_one_shot"
    summary = "CPU tensors: every rank copies its peers' inputs from shared memory"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        stage, nbytes = HostStage(workspace, problem, config), problem.nbytes
        own_slots, addresses, copy, at_own = stage.own_slots, stage.addresses, stage.copy, stage.ring.rank * nbytes
        peers = [rank for rank in range(problem.world_size) if rank != stage.ring.rank]

        def take(slot: int, at_x: int, at_out: int, first: int, size: int) -> None:
            copy(at_out + at_own + first, at_x + first, size)
            for peer in peers:
                copy(at_out + peer * nbytes + first, addresses[peer][slot], size)

        return stage.one_pass(lambda slot, at_x, first, size: copy(own_slots[slot], at_x + first, size), take)
