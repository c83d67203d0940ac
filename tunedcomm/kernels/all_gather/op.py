"""all_gather: every rank gets all ranks' inputs, one after another in rank order; the base class of its variants."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.common.packets import ESCAPE
from tunedcomm.kernels.common.reference import generator_of, outputs_of_ranks, powers_of_two
from tunedcomm.kernels.common.sync import SENTINEL
from tunedcomm.kernels.common.variant import MoveVariant
from tunedcomm.metrics import busbw_factor
from tunedcomm.space import Config
from tunedcomm.spec import DTYPES, OpSpec, Problem, register_op

if TYPE_CHECKING:
    import torch

# Packets of all ranks that a thread and a block take at once: with more, registers spill.
_MOST_PACKETS, _MOST_PACKETS_A_BLOCK = 16, 4096


def _make_inputs(problem: Problem, rank: int, seed: int, kind: str, device: Any) -> tuple[torch.Tensor]:
    """Values of the dtype; `integers` come with a few words that the packet protocol has to disguise."""
    import torch

    dtype = getattr(torch, problem.dtype)
    generator = generator_of(rank, seed, device)
    if kind == "random" and dtype.is_floating_point:
        values = torch.randn(problem.numel, generator=generator, device=device, dtype=torch.float32)
        return (values.to(dtype),)
    values = torch.randint(0, 17, (problem.numel,), generator=generator, device=device, dtype=torch.int32).to(dtype)
    words = values.view(torch.uint8)[: problem.nbytes // 4 * 4].view(torch.int32)
    if kind == "integers" and len(words):
        places = torch.randint(0, len(words), (len(words) // 32 + 2,), generator=generator, device=device)
        words[places[0::2]] = SENTINEL.value
        words[places[1::2]] = ESCAPE.value
    return (values,)


def _reference(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor]:
    import torch

    del problem, rank
    return (torch.cat([values.to(torch.float64) for (values,) in inputs]),)


def _ordered_reference(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor]:
    import torch

    del problem, rank
    dtype = inputs[0][0].dtype
    return (torch.cat([values.view(torch.uint8) for (values,) in inputs]).view(dtype),)


ALL_GATHER = register_op(
    OpSpec(
        name="all_gather",
        summary="every rank gets all ranks' inputs, one after another in rank order",
        reductions=(),
        dtypes=DTYPES,
        shape_help="number of elements of one rank's input, e.g. 98304",
        rank_of_shape=1,
        make_inputs=_make_inputs,
        make_outputs=outputs_of_ranks,
        reference=_reference,
        tolerance=dict.fromkeys(DTYPES, 0.0),
        message_bytes=lambda problem: problem.nbytes,
        busbw_factor=lambda world_size: busbw_factor("all_gather", world_size),
        default_shapes=functools.partial(powers_of_two, largest_mib=128),
        ordered_reference=_ordered_reference,
    )
)


class AllGatherVariant(MoveVariant):
    op = "all_gather"

    def refuse_items(self, problem: Problem, config: Config) -> str | None:
        """Return why a thread cannot hold the packets of all ranks that `config` gives it at once, or None."""
        packets, threads = int(config["items"]) * problem.world_size, 32 * int(config["num_warps"])
        if packets > _MOST_PACKETS or packets * threads > _MOST_PACKETS_A_BLOCK:
            return f"{packets} packets in each of {threads} threads at once spill registers"
        return None
