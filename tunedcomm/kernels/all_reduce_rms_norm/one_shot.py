"""one_shot: every rank reads all ranks' rows and takes their sums through the norm; one flag exchange a block.

Areas, flags and lane rules are those of all_reduce's `one_shot` on plain input, row by row: a block copies its rows
into the one-shot area, exchanges flags with the blocks of its number, and reads from the peers the rows that those
copied.

Numerics: ordered. Graph-safe.
Source: all_reduce's `one_shot`, with the norm behind it as in Kraken's one-shot.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm.kernels.all_reduce_rms_norm.op import RmsNormVariant, row_warps
from tunedcomm.kernels.all_reduce_rms_norm.rows import finish_row, row_extras
from tunedcomm.kernels.common.feasibility import refuse_one_shot
from tunedcomm.kernels.common.lane import EPOCH_OFFSET, address_of, arrive, await_peers, read_counter, write_counter
from tunedcomm.kernels.common.packets import insert_own, sum_packets
from tunedcomm.kernels.common.sync import load_packets, store_packets
from tunedcomm.kernels.common.variant import HOST_GRID
from tunedcomm.space import Choice, Config, PowerOfTwo, Space
from tunedcomm.spec import Limits, Problem


@triton.jit
def rms_norm_one_shot_kernel(
    x, weight, bias, residual, scale, out, residual_out, eps, tokens, row,
    local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status, area, area_bytes,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, FP8: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Publish own rows, exchange flags; then row by row: read all ranks', sum, add, normalise."""
    epoch = read_counter(local, EPOCH_OFFSET)
    mine = area + (epoch & 1) * area_bytes
    peers = (q0 + mine, q1 + mine, q2 + mine, q3 + mine, q4 + mine, q5 + mine, q6 + mine)
    at = tl.arange(0, BLOCK).to(tl.int64)
    here = at < row
    for r in tl.range(tl.program_id(0), tokens, tl.num_programs(0)):
        packet = at + r * row
        w0, w1, w2, w3 = load_packets(x + packet * 16, here)
        store_packets(local + mine + packet * 16, w0, w1, w2, w3, here)

    # Releases the copies, acquires the peers'.
    arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + 1, WORLD_SIZE)
    of_row = load_packets(weight + at * 16, here & (tl.program_id(0) < tokens))
    await_peers(local, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)

    for r in tl.range(tl.program_id(0), tokens, tl.num_programs(0)):
        packet = at + r * row
        own = load_packets(x + packet * 16, here)
        b, extra = row_extras(bias, residual, at, packet, here, BIAS, RESIDUAL)
        words = ()
        for i in tl.static_range(WORLD_SIZE):
            source = address_of(peers, x, i, rank, WORLD_SIZE)
            words = words + load_packets(source + packet * 16, here & (rank != i))
        s = sum_packets(insert_own(words, own, rank, WORLD_SIZE), DTYPE, False, WORLD_SIZE)
        finish_row(
            s, b, extra, of_row, out, residual_out, scale, eps, row, packet, here, DTYPE, BIAS, RESIDUAL, FP8, BLOCK
        )
    write_counter(local, epoch + 1, EPOCH_OFFSET)


class OneShot(RmsNormVariant):
    name = "one_shot"
    summary = "every rank reads all ranks' rows, sums and normalises them; one exchange of flags"
    kernels = (rms_norm_one_shot_kernel,)
    areas = ("one_shot", "one_shot_bytes")
    space = Space({"num_blocks": Choice(1, 2, 4, 8, 16, 32, 64, 128), "num_warps": PowerOfTwo(1, 32)})

    host_wish = HOST_GRID

    def refuse_config(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if reason := super().refuse_config(problem, config, limits) or refuse_one_shot(problem, limits):
            return reason
        if int(config["num_blocks"]) > problem.shape[0]:
            return f"{config['num_blocks']} blocks for {problem.shape[0]} rows: the others would have nothing to do"
        return None

    def wish(self, problem: Problem, limits: Limits) -> dict[str, float]:
        return {"num_blocks": min(problem.shape[0], 128), "num_warps": row_warps(problem)}


ONE_SHOT = OneShot().register()
