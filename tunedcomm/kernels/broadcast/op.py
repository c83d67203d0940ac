"""broadcast: every rank gets one rank's input; the base class of its variants, `library` and `host_one_shot`.

Launches take the input, the root's rank within the group, and the output, which may be the input. Only the root's input
is read; the others' only say how many elements come.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.host import HostStage, HostVariant
from tunedcomm.kernels.common.launch import AddressLaunch, Argument
from tunedcomm.kernels.common.reference import draw_any, hidden_states, outputs_like, register_move
from tunedcomm.kernels.common.variant import LibraryVariant, MoveVariant, Workspace
from tunedcomm.space import Config
from tunedcomm.spec import Problem

if TYPE_CHECKING:
    import torch


def _make_inputs(problem: Problem, rank: int, seed: int, kind: str, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    root = torch.full((1,), seed % problem.world_size, dtype=torch.int64, device="cpu")
    return draw_any(problem, problem.numel, rank, seed, kind, device), root


def _received(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> torch.Tensor:
    del problem
    x: torch.Tensor = inputs[int(inputs[rank][1])][0]
    return x


BROADCAST = register_move(
    "broadcast",
    "every rank gets one rank's tensor",
    shape_help="number of elements, e.g. 98304",
    make_inputs=_make_inputs,
    make_outputs=outputs_like,
    received=_received,
    largest_mib=128,
    model_shapes=hidden_states,
    is_per_rank=False,
    # Only the root's values count, so no rank's are looked at for NaN.
    mask_unspecified=lambda problem, inputs, outputs: ((), outputs),
)


def addresses(inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[int, ...]:
    """Arguments that vary from launch to launch: addresses of input and output, and the root."""
    return inputs[0].data_ptr(), outputs[0].data_ptr(), int(inputs[1])


class BroadcastVariant(MoveVariant):
    op = "broadcast"

    def first_arguments(self, problem: Problem) -> tuple[Argument | None, ...]:
        return (None, None, None, problem.nbytes)  # x, out, root

    def addresses(self, problem: Problem, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[int, ...]:
        return addresses(inputs, outputs)


class Library(LibraryVariant, registered=True):
    """NCCL (gloo on CPUs). Dtypes that the backend does not know travel as bytes. Graph-safe on NCCL."""

    op = "broadcast"
    numerics = "ordered"  # nothing is computed

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch
        import torch.distributed as dist

        group, rank = workspace.group, workspace.rank
        known = {getattr(torch, name) for name in self.named_dtypes}

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            x, out, root = inputs[0], outputs[0], int(inputs[1])
            if rank == root and x.data_ptr() != out.data_ptr():
                out.copy_(x)
            sent = out if out.dtype in known else out.view(-1).view(torch.uint8)
            dist.broadcast(sent, group=group, group_src=root)

        return run


class HostOneShot(HostVariant, registered=True):
    """A pass through the ring of slots in shared memory (`symm.ring`): every rank copies the root's slots.

    All ranks publish and wait, so that no rank runs ahead of the slots that its peers still read. Numerics: ordered.
    """

    op = "broadcast"
    name = "host_one_shot"
    summary = "CPU tensors: the root's input goes through shared memory"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        stage = HostStage(workspace, problem, config)
        slots, copy, rank = stage.addresses, stage.copy, stage.ring.rank

        @functools.cache
        def launch_of(root: int) -> AddressLaunch:
            def put(slot: int, at_x: int, first: int, size: int) -> None:
                if rank == root:
                    copy(slots[rank][slot], at_x + first, size)

            def take(slot: int, at_x: int, at_out: int, first: int, size: int) -> None:
                if rank != root:
                    copy(at_out + first, slots[root][slot], size)
                elif at_out != at_x:
                    copy(at_out + first, at_x + first, size)

            return stage.one_pass(put, take, f"from rank {root}")

        def run(stream: int, at_x: int, at_out: int, root: int) -> None:
            launch_of(root).by_address(stream, at_x, at_out)

        return AddressLaunch(run, addresses)
