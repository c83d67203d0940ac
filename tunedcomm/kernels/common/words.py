"""Single words that announce themselves, beside the packets of `_sync`; as there, in PTX or interpreted."""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm.kernels.common.sync import (
    _STATUS_BYTES,
    _WAIT_REGISTERS,
    INTERPRET,
    SENTINEL,
    _bounded_loop,
    _clock_ns,
    _note_missing,
    _outs,
    _u32s,
    _yield_cpu,
    as_mask,
)

__all__: list[str] = []


@triton.constexpr_function
def _poll_words_asm(n):
    """PTX that loads one word of each of `n` slots whose bits are set until none of them is the sentinel.

    Operands: n outputs (0 where the bit is not set), then address of the word in slot 0, slot stride, bits, timeout,
    status.
    """
    address, stride, bits, timeout, status = (f"${n + i}" for i in range(5))
    lines = ["{", _WAIT_REGISTERS, ".reg .u32 bit;"]
    lines += [f".reg .pred use{i};" for i in range(n)] + [f".reg .u64 a{i};" for i in range(n)]
    lines += [f"mov.u32 ${i}, 0;" for i in range(n)] + [f"mov.u64 a0, {address};"]
    lines += [f"add.u64 a{i}, a{i - 1}, {stride};" for i in range(1, n)]
    poll, missed = [], []
    for i in range(n):
        lines += [f"and.b32 bit, {bits}, {1 << i};", f"setp.ne.u32 use{i}, bit, 0;"]
        poll.append(f"@use{i} ld.relaxed.sys.global.u32 ${i}, [a{i}];")
        missed += [f"and.pred bad, use{i}, late;", f"@bad st.volatile.global.u32 [block+{4 + 4 * i}], number;"]
    poll += [f"setp.eq.u32 use{i}, ${i}, 0x80000000;" for i in range(n)]
    poll.append("mov.pred any, use0;")
    poll += [f"or.pred any, any, use{i};" for i in range(1, n)]
    lines += [_bounded_loop(poll, missed, timeout, status), "}"]
    return "\n".join(lines)


@triton.jit
def poll_words(address, slot_bytes, slots, timeout_ns, status, WORLD_SIZE: tl.constexpr):
    """Wait for one word of every slot whose bit is set in `slots` and return `WORLD_SIZE` words, slot by slot.

    Args:
        address: int64 tensor, the word's place in slot 0; slot i lies i × `slot_bytes` further.
        slots: int32 tensor of bits; words of slots whose bit is not set are 0, and nothing waits for them.
        timeout_ns, status: see the module's text.
    """
    if INTERPRET:
        words = ()
        for i in tl.static_range(WORLD_SIZE):
            wanted = (slots & (1 << i)) != 0
            p = (address + i * slot_bytes).to(tl.pointer_type(tl.int32))
            waiting = True
            start = _clock_ns()
            while waiting:
                word = tl.load(p, mask=wanted, other=0, volatile=True)
                waiting = tl.max((word == SENTINEL).to(tl.int32), axis=0) > 0
                if waiting:
                    _yield_cpu()
                    if tl.load((status & -_STATUS_BYTES).to(tl.pointer_type(tl.int32))) != 0:
                        waiting = False
                    elif _clock_ns() - start > timeout_ns:
                        ranks = tl.arange(0, 1) + i
                        _note_missing(ranks, ranks >= 0, status)
                        waiting = False
            words = words + (word,)  # type: ignore[assignment]
        return words
    else:
        return tl.inline_asm_elementwise(
            _poll_words_asm(WORLD_SIZE),
            _outs(WORLD_SIZE, "l,l,r,l,l"),
            [address, slot_bytes, slots, timeout_ns, status],
            dtype=_u32s(WORLD_SIZE),
            is_pure=False,
            pack=1,
        )


@triton.jit
def store_word(address, word, mask):
    """Store a 32-bit word to each `address` where `mask`, relaxed at system scope: a peer polls it."""
    if INTERPRET:
        tl.store(address.to(tl.pointer_type(tl.int32)), word, mask=as_mask(mask))
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            setp.ne.u32 p, $3, 0;
            mov.u32 $0, 0;
            @p st.relaxed.sys.global.u32 [$1], $2;
            }""",
            "=&r,l,r,r",
            [address, word, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.constexpr_function
def _poll_from_asm():
    """PTX that loads one packet until no word of it is the sentinel.

    Operands: 4 outputs, then address, mask, the rank that sends it, timeout, status.
    """
    address, mask, rank, timeout, status = (f"${4 + i}" for i in range(5))
    lines = ["{", _WAIT_REGISTERS, ".reg .pred use;"]
    lines += [f"mov.u32 ${i}, 0;" for i in range(4)] + [f"setp.ne.u32 use, {mask}, 0;"]
    poll = [f"@use ld.relaxed.sys.global.v4.u32 {{$0, $1, $2, $3}}, [{address}];"]
    poll.append("setp.eq.u32 use, $0, 0x80000000;")
    poll += [f"setp.eq.or.u32 use, ${w}, 0x80000000, use;" for w in range(1, 4)]
    poll.append("mov.pred any, use;")
    missed = [
        f"mul.wide.u32 slot, {rank}, 4;",
        "add.u64 slot, slot, block;",
        "and.pred bad, use, late;",
        "@bad st.volatile.global.u32 [slot+4], number;",
    ]
    lines += [_bounded_loop(poll, missed, timeout, status), "}"]
    return "\n".join(lines)


@triton.jit
def poll_from(address, mask, ranks, timeout_ns, status):
    """Wait for the packet at each `address` where `mask` and return its four words; 0 elsewhere.

    `ranks` (int32) says who sends each packet, for the status block.
    """
    if INTERPRET:
        p = address.to(tl.pointer_type(tl.int32))
        mask = as_mask(mask)
        waiting = True
        start = _clock_ns()
        while waiting:
            w0 = tl.load(p, mask=mask, other=0, volatile=True)
            w1 = tl.load(p + 1, mask=mask, other=0, volatile=True)
            w2 = tl.load(p + 2, mask=mask, other=0, volatile=True)
            w3 = tl.load(p + 3, mask=mask, other=0, volatile=True)
            missing = (w0 == SENTINEL) | (w1 == SENTINEL) | (w2 == SENTINEL) | (w3 == SENTINEL)
            waiting = tl.max(missing.to(tl.int32), axis=0) > 0
            if waiting:
                _yield_cpu()
                if tl.load((status & -_STATUS_BYTES).to(tl.pointer_type(tl.int32))) != 0:
                    waiting = False
                elif _clock_ns() - start > timeout_ns:
                    _note_missing(ranks, missing, status)
                    waiting = False
        return w0, w1, w2, w3
    else:
        return tl.inline_asm_elementwise(
            _poll_from_asm(),
            _outs(4, "l,r,r,l,l"),
            [address, mask.to(tl.int32), ranks, timeout_ns, status],
            dtype=_u32s(4),
            is_pure=False,
            pack=1,
        )
