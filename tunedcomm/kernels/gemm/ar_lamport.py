"""gemm_ar, lamport: a GEMM for few rows whose epilogue pushes tiles to all ranks as packets that announce themselves.

A block computes a tile over a part of the depth. Where the depth is cut into `split_k` parts, which lets more blocks
read B at once, the parts go to memory of this rank, and the block that comes last to the tile adds them in the order of
the depth. The block that has the whole tile rounds it and pushes its packets into this rank's slot of every rank's
stage, the own stage included. Then all blocks share all packets of the result: they poll all slots, put the sentinel
back, sum in rank order, add the bias and store.

Stages, their clearing and why two of them are enough: see all_reduce's `lamport`, whose protocol this is; slot r holds
rank r's product, tightly packed. That the own product takes the way of the peers' makes no difference to that, and
frees every packet from the block that computed it.

No block waits before it has pushed all that it will push, and all blocks are resident, so every packet comes. Blocks
come to a tile's counter after their part is stored and visible; the last one sets it back for the next call. Parts and
counters belong to the plan, whose calls follow each other.

Numerics: library (the order of the sum over the depth is the config's; every rank has the same bits). Graph-safe: the
call counter lives in the lane.
Source: the packets of TensorRT-LLM's and FlashInfer's low-latency all-reduce, in a GEMM's epilogue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.lane import STATE_OFFSET, block_range, read_counter, write_counter
from tunedcomm.kernels.common.launch import AddressLaunch, bind_kernel
from tunedcomm.kernels.common.packets import PACKET_BYTES, arm
from tunedcomm.kernels.common.sync import INTERPRET, SENTINEL, poll_packets, store_packets
from tunedcomm.kernels.common.variant import lane_arguments
from tunedcomm.kernels.gemm.ar import refuse_packets, sum_and_bias
from tunedcomm.kernels.gemm.op import out_itemsize, wanted_of
from tunedcomm.kernels.gemm.tiles import (
    element_type,
    matrix,
    operand_b,
    part_product,
    pointer_product,
    scaled,
    tile_words,
)
from tunedcomm.kernels.gemm.variant import GemmVariant, addresses, num_tiles, refuse_tiles, tile_wish
from tunedcomm.space import Choice, Config, Space, Value
from tunedcomm.spec import ITEMSIZE, Limits, Problem

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

_MOST_ROWS = 256
_MOST_PARTS = 512  # tiles in parts: each has a counter
_SHARED_BYTES = 200 * 1024


@triton.jit
def _is_last_part(counters, tile, SPLIT: tl.constexpr):
    """True for the block that comes to a tile as the last of SPLIT; it sees what the others stored before."""
    if not INTERPRET:
        tl.debug_barrier()  # all threads of the block have stored
    place = counters.to(tl.pointer_type(tl.int32)) + tile
    last = tl.atomic_add(place, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
    if last:
        tl.store(place, tl.num_programs(0) * 0)
    return last


@triton.jit
def _push(
    total, q0, q1, q2, q3, q4, q5, q6, local, slot, row, column, m, packets,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OUT: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Round a tile and push it into the slot at offset `slot` of every rank, whose rows have `packets` packets."""
    PER: tl.constexpr = 128 // element_type(OUT).primitive_bitwidth
    peers = (q0, q1, q2, q3, q4, q5, q6)
    w0, w1, w2, w3 = tile_words(total, BLOCK_M, BLOCK_N, OUT)
    w0, w1, w2, w3 = arm(w0), arm(w1), arm(w2), arm(w3)
    r = row + tl.arange(0, BLOCK_M).to(tl.int64)[:, None]
    c = column // PER + tl.arange(0, BLOCK_N // PER).to(tl.int64)[None, :]
    here = (r < m) & (c < packets)
    place = slot + (r * packets + c) * 16
    for i in tl.static_range(WORLD_SIZE - 1):
        store_packets(peers[i] + place, w0, w1, w2, w3, here, REMOTE=True)
    store_packets(local + place, w0, w1, w2, w3, here, REMOTE=True)


@triton.jit
def gemm_lamport_kernel(
    a, b, bias, scale_a, scale_b, out, m, n, k, parts, counters, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns,
    status, arena, stage_bytes,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NK: tl.constexpr, DTYPE: tl.constexpr,
    OUT: tl.constexpr, SCALING: tl.constexpr, WORLD_SIZE: tl.constexpr, SPLIT: tl.constexpr, POINTERS: tl.constexpr,
    BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See the module's text. `parts` has room for a tile of fp32 for each part, `counters` an int32 a tile."""
    if PDL and not INTERPRET:
        gdc_wait()
    calls = read_counter(local, STATE_OFFSET)
    stage = arena + (calls & 1) * stage_bytes
    PER: tl.constexpr = 128 // element_type(OUT).primitive_bitwidth
    packets = n // PER
    count = m * packets
    rows = (m + BLOCK_M - 1) // BLOCK_M
    tiles = rows * ((n + BLOCK_N - 1) // BLOCK_N)
    span = (k + BLOCK_K * SPLIT - 1) // (BLOCK_K * SPLIT) * BLOCK_K
    within = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    if not POINTERS:
        x = matrix(a, m, k, BLOCK_M, BLOCK_K, DTYPE)
        y = operand_b(b, k, n, BLOCK_N, BLOCK_K, NK, DTYPE)

    for item in tl.range(tl.program_id(0), tiles * SPLIT, tl.num_programs(0)):
        tile, part = item // SPLIT, item % SPLIT
        row, column = (tile % rows * BLOCK_M).to(tl.int32), (tile // rows * BLOCK_N).to(tl.int32)
        start, end = part * span, tl.minimum((part + 1) * span, k)
        if POINTERS:
            total = pointer_product(a, b, row, column, start, end, m, n, k, BLOCK_M, BLOCK_N, BLOCK_K, NK, DTYPE)
        else:
            total = part_product(x, y, row, column, start, end, BLOCK_M, BLOCK_N, BLOCK_K, NK)
        if SPLIT > 1:
            base = parts.to(tl.pointer_type(tl.float32)) + tile * (SPLIT * BLOCK_M * BLOCK_N)
            at = tl.multiple_of(base, 16) + within
            tl.store(at + part * (BLOCK_M * BLOCK_N), total)
            if _is_last_part(counters, tile, SPLIT):
                whole = tl.load(at)
                for i in tl.static_range(1, SPLIT):
                    whole += tl.load(at + i * (BLOCK_M * BLOCK_N))
                whole = scaled(whole, scale_a, scale_b, row, column, m, n, SCALING, BLOCK_M, BLOCK_N)
                _push(
                    whole, q0, q1, q2, q3, q4, q5, q6, local, stage + rank * count * 16, row, column, m, packets,
                    BLOCK_M, BLOCK_N, OUT, WORLD_SIZE,
                )  # fmt: skip
        else:
            total = scaled(total, scale_a, scale_b, row, column, m, n, SCALING, BLOCK_M, BLOCK_N)
            _push(
                total, q0, q1, q2, q3, q4, q5, q6, local, stage + rank * count * 16, row, column, m, packets,
                BLOCK_M, BLOCK_N, OUT, WORLD_SIZE,
            )  # fmt: skip
    if PDL and not INTERPRET:
        gdc_launch_dependents()

    lanes, first, step = block_range(BLOCK)
    empty = tl.full((BLOCK,), SENTINEL, tl.int32)
    for begin in tl.range(first, count, step):
        packet = begin + lanes
        here = packet < count
        place = local + stage + packet * 16
        words = poll_packets(place, count * 16, here, rank * 0 - 1, timeout_ns, status, WORLD_SIZE)
        for i in tl.static_range(WORLD_SIZE):
            store_packets(place + i * count * 16, empty, empty, empty, empty, here)
        s0, s1, s2, s3 = sum_and_bias(words, bias, packet % packets, here, OUT, BIAS, WORLD_SIZE)
        store_packets(out + packet * 16, s0, s1, s2, s3, here)
    write_counter(local, calls + 1, STATE_OFFSET)


class Lamport(GemmVariant):
    op = "gemm_ar"
    name = "lamport"
    numerics = "library"
    summary = "a GEMM whose epilogue pushes packets that announce themselves; for few rows"
    kernels = (gemm_lamport_kernel,)
    space = Space(
        {
            "block_m": Choice(16, 32, 64),
            "block_n": Choice(32, 64, 128),
            "block_k": Choice(32, 64, 128, 256),
            "num_warps": Choice(4, 8),
            "num_stages": Choice(1, 2, 4, 6),
            "split_k": Choice(1, 2, 4, 8),
            "pointers": Choice(False, True),
            "launch_pdl": Choice(False, True),
        }
    )

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        m, n, k = problem.shape
        if reason := refuse_packets(problem, limits, panel_bytes=0):
            return reason
        nbytes, on_gpus = m * n * out_itemsize(problem), limits.backend == "cuda"
        if m > _MOST_ROWS:
            return f"{m} rows are a matter of bandwidth: at most {_MOST_ROWS}"
        if nbytes * problem.world_size > limits.stage_bytes:
            return f"{nbytes} bytes from {problem.world_size} ranks exceed a stage of {limits.stage_bytes} bytes"
        if config["launch_pdl"] and not limits.launch_pdl:
            return "programmatic dependent launch is not available here"
        block_m, split = int(config["block_m"]), int(config["split_k"])
        packets = block_m * int(config["block_n"]) * out_itemsize(problem) // PACKET_BYTES
        if on_gpus and packets < 32 * int(config["num_warps"]):
            # The second copy would come after the first was polled, and lie there for the next call but one.
            return f"a tile has {packets} packets: threads beyond would push some of them twice"
        if on_gpus and m > block_m and block_m < 64:
            return f"{m} rows go into one tile, or into tiles of 64 rows"
        if reason := refuse_tiles(problem, {**config, "group": 1}, limits, rows=m):
            return reason
        if split == 1:
            return None
        if on_gpus and -(-k // int(config["block_k"])) < 2 * split:
            return f"a depth of {k} in {split} parts leaves a block less than two steps"
        tiles = num_tiles(m, problem, config)
        if tiles > _MOST_PARTS:
            return f"{tiles} tiles keep all SMs busy: only split_k=1"
        if on_gpus and tiles * split > 8 * limits.num_sms:
            return f"{tiles} tiles in {split} parts are more than 8 blocks an SM"
        return None

    def wish(self, problem: Problem, limits: Limits) -> dict[str, Any]:
        m, _, k = problem.shape
        wish: dict[str, Any] = {**tile_wish(problem, limits, rows=min(m, 64)), "pointers": False}
        wish["launch_pdl"] = limits.launch_pdl
        if limits.backend == "host":
            return {**wish, "split_k": 2}
        tiles = max(num_tiles(m, problem, wish), 1)
        steps = max(k // int(wish["block_k"]) // 2, 1)
        return {**wish, "split_k": max(min(self._per_sm(problem, wish) * limits.num_sms // tiles, steps, 8), 1)}

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        found = super().constants(problem, {**config, "group": 1})
        del found["GROUP"]
        own: dict[str, Value] = {"SPLIT": config["split_k"], "POINTERS": config["pointers"]}
        own |= {"BIAS": wanted_of(problem).bias, "BLOCK": 32 * int(config["num_warps"]), "PDL": config["launch_pdl"]}
        return {**found, **own}

    def num_blocks(self, problem: Problem, config: Config) -> int:
        """Parts of tiles: the blocks of the grid at most, on any GPU."""
        return num_tiles(problem.shape[0], problem, config) * int(config["split_k"])

    def _per_sm(self, problem: Problem, config: Config) -> int:
        """Blocks that an SM holds for certain, with up to 128 registers a thread."""
        m, n, k = (int(config[name]) for name in ("block_m", "block_n", "block_k"))
        shared = int(config["num_stages"]) * (m + n) * k * ITEMSIZE[problem.dtype] + m * n * 4 + 1024
        return max(min(_SHARED_BYTES // shared, 16 // int(config["num_warps"])), 1)

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch

        device, on_gpu = workspace.device, workspace.device.type == "cuda"
        # One block on the host: interpreted ones run one after another, and here they wait for each other.
        sms = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 0
        grid = max(min(self.num_blocks(problem, config), self._per_sm(problem, config) * sms), 1)
        kernel = bind_kernel(self.request(problem, config), grid, device)
        tiles, split = num_tiles(problem.shape[0], problem, config), int(config["split_k"])
        room = tiles * split * int(config["block_m"]) * int(config["block_n"]) if split > 1 else 4
        parts = workspace.scratch(problem.mode, room * 4)
        counters = torch.zeros(tiles, dtype=torch.int32, device=device)
        if on_gpu:
            torch.cuda.synchronize(device)  # a launch may be on any stream
        memory = (parts.data_ptr(), counters.data_ptr())
        lane, stage = lane_arguments(problem, workspace), (workspace.layout.arena, workspace.layout.stage_bytes)
        launch: Any = kernel.fix((*(None,) * 6, *problem.shape, *memory, *lane, *stage))
        launch.keep = counters  # live as long as the launch
        return AddressLaunch(launch, addresses(problem))


LAMPORT = Lamport().register()
