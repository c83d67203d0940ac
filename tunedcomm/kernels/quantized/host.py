"""host_quantized: CPU tensors over a ring of slots in shared memory; every rank takes what all ranks have quantised.

Numerics: quantized, the bits of `one_shot_quantized`.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from tunedcomm.fp8 import FP8_WIRE, GROUP, dequantised, quantised
from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.host import HostStage, HostVariant
from tunedcomm.kernels.common.reference import SUM_DTYPES, reduced
from tunedcomm.kernels.common.variant import Workspace
from tunedcomm.space import Config
from tunedcomm.spec import ITEMSIZE, Problem
from tunedcomm.state import clean_thread

if TYPE_CHECKING:
    import torch


_SCALE_BYTES = 4


class _Host(HostVariant):
    name = "host_quantized"
    summary = "CPU tensors: every rank takes what all ranks have quantised from shared memory"
    numerics = "quantized"
    dtypes = SUM_DTYPES

    def slot_bytes(self, problem: Problem) -> int:
        return problem.nbytes * (problem.world_size if problem.op == "reduce_scatter" else 1)

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch

        width, nbytes, is_sum = ITEMSIZE[problem.dtype], problem.nbytes, problem.op != "all_gather"
        wire = problem.scaling
        segments = problem.world_size if problem.op == "reduce_scatter" else 1
        stage = HostStage(workspace, problem, config, segments=segments)
        if stage.chunk < nbytes:  # whole groups
            stage.chunk = max(stage.chunk // (GROUP * width), 1) * GROUP * width
        dtype, of_wire = getattr(torch, problem.dtype), torch.float8_e4m3fn if wire == FP8_WIRE else torch.int8
        own_slots, of_ranks, me = stage.own_slots, stage.addresses, stage.ring.rank if segments > 1 else 0

        def at(address: int, size: int, kind: torch.dtype) -> torch.Tensor:
            return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=kind)

        def packed(address: int, index: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
            """(q, scales) of segment `index` of a slot that holds pieces of `size` bytes."""
            groups = -(-size // (GROUP * width))
            address += index * groups * (GROUP + _SCALE_BYTES)
            q = at(address, groups * GROUP, of_wire).view(-1, GROUP)
            return q, at(address + groups * GROUP, groups * _SCALE_BYTES, torch.float32)

        @clean_thread()
        def put(slot: int, at_x: int, first: int, size: int) -> None:
            for segment in range(segments):
                made = quantised(at(at_x + segment * nbytes + first, size, dtype), wire)
                for place, values in zip(packed(own_slots[slot], segment, size), made, strict=True):
                    place.copy_(values)

        @clean_thread()
        def take(slot: int, at_x: int, at_out: int, first: int, size: int) -> None:
            parts = [dequantised(*packed(slots[slot], me, size))[: size // width] for slots in of_ranks]
            parts = [reduced(parts, problem.reduction, torch.float32)] if is_sum else parts
            for rank, part in enumerate(parts):
                at(at_out + rank * nbytes + first, size, dtype).copy_(part if is_sum else part + 0.0)

        return stage.one_pass(put, take)


class AllReduceHost(_Host, registered=True):
    op = "all_reduce"


class ReduceScatterHost(_Host, registered=True):
    op = "reduce_scatter"


class AllGatherHost(_Host, registered=True):
    op = "all_gather"
