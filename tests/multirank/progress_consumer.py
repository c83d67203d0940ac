"""A kernel that reads a gather while it is under way; a module of its own, for Triton reads its source."""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm.kernels.all_gather.progress import wait_chunk


@triton.jit
def sum_kernel(out, sums, numel, chunk, num_chunks, flags, timeout_ns, status, BLOCK: tl.constexpr):
    """Block r sums every chunk of rank r's shard of fp32, which has `numel` elements, `chunk` of them a chunk."""
    source = tl.program_id(0)
    for c in tl.range(0, num_chunks):
        wait_chunk(flags, source, c, timeout_ns, status)
        total = tl.zeros((BLOCK,), tl.float32)
        end = tl.minimum((c + 1) * chunk, numel)
        for start in tl.range(c * chunk, end, BLOCK):
            at = start + tl.arange(0, BLOCK).to(tl.int64)
            place = (out.to(tl.int64) + (source * numel + at) * 4).to(tl.pointer_type(tl.float32))
            total += tl.load(place, mask=at < end, other=0.0)
        place = (sums.to(tl.int64) + (source * num_chunks + c) * 4).to(tl.pointer_type(tl.float32))
        tl.store(place, tl.sum(total, axis=0))
