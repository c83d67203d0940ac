"""Loads, stores, polling and flags on the device: 16-byte packets and single words, in PTX or interpreted.

Every function has two bodies behind one signature. Compiled for a GPU it is PTX; under Triton's interpreter (host
backend) it is plain loads, stores and atomics, so that the very same kernels run across processes on a CPU.

**Packets.** Kernels move data as packets of 16 bytes, four 32-bit words held in four int32 tensors of equal shape: one
element is one packet, and with `BLOCK` a multiple of 32 × num_warps each thread owns whole packets. Addresses are
int64, not pointers, so that one binary serves every rank and every allocation.

**Waiting is bounded.** Every wait gives up `timeout_ns` after it began, notes the missing ranks in the status block
(pinned host memory) and leaves the kernel. The clock is read only once in 1024 failed polls, so that the bound costs
nothing on the path that matters.

The status block is 32-bit words at a multiple of `STATUS_BYTES`. Word 0 is 1 once any wait has given up; word 1 + r is
then the number of the call that missed rank r. Kernels get the block's address plus that number, which is below
`STATUS_BYTES`, as their one argument `status`.

**What orders what.** Packets of the Lamport protocol carry their own arrival (no word equals the sentinel once it is
there), so they need no fence. Flags order other data: `signal` releases at system scope after a block barrier, `wait`
acquires at system scope before one; PTX's release and acquire are cumulative over the block barrier.
"""

from __future__ import annotations

import time

import triton
import triton.language as tl

from tunedcomm.kernels.common.source_hash import ignore
from tunedcomm.symm import layout

INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))
ignore(INTERPRET)
SENTINEL = tl.constexpr(-0x80000000)  # as int32: −0.0 in fp32, (−0.0, +0.0) in two 16-bit halves

_POLLS = 1024  # failed polls between two looks at the clock
_STATUS_BYTES = tl.constexpr(layout.STATUS_BYTES)
_WAIT_REGISTERS = (
    ".reg .pred active, again, late, any, bad; .reg .u32 polls, tmp, number; .reg .u64 now, since, block, slot;"
)


class _clock_ns:  # noqa: N801
    """Interpreter only: `_clock_ns()` is the monotonic clock in ns.

    A class and not a function, because Triton refuses kernels that so much as mention a plain Python function.
    """

    def __new__(cls) -> int:  # type: ignore[misc]
        return time.monotonic_ns()


class _yield_cpu:  # noqa: N801
    """Interpreter only: `_yield_cpu()` lets another process run, since the peer may need this very core."""

    def __new__(cls) -> None:  # type: ignore[misc]
        time.sleep(0)


@triton.constexpr_function
def _u32s(count):
    return (tl.int32,) * count


@triton.constexpr_function
def _outs(count, inputs):
    return "=&r," * count + inputs


@triton.constexpr_function
def _bounded_loop(poll, missed, timeout, status):
    """PTX that repeats the instructions `poll` until none of the warp's lanes has set the predicate `any`.

    Uses `_WAIT_REGISTERS`. After the bound the instructions `missed` note the missing ranks (`late` says that the own
    bound is over, `block` and `number` hold the two parts of the status argument), the status block is set, and the
    warp leaves the kernel: barriers do not wait for warps that have left. A status block that is set already (an
    earlier launch gave up) ends the wait too, so that a graph of many launches does not wait its bound many times.

    The way through is laid out for speed. A warp stays together, so no lane has to be waited for afterwards. The look
    at the clock stands before the polls and is passed on the way in, while the data are under way anyhow; all else that
    only a lost peer makes necessary ends in `exit`, so that the assembler puts it at the kernel's end. What follows the
    polls then follows them in memory too: jumping over so much as 30 instructions costs a fetch of 0.09 us on H200.
    """
    lines = [
        f"and.b64 block, {status}, -{layout.STATUS_BYTES};",
        "mov.u64 since, %globaltimer;",
        "setp.ne.u32 again, 0, 0;",
        "LOOK:",
        "mov.u64 now, %globaltimer;",
        "sub.u64 now, now, since;",
        f"setp.ge.u64 late, now, {timeout};",
        "mov.u32 tmp, 0;",
        "@again ld.volatile.global.u32 tmp, [block];",
        "setp.eq.and.u32 again, tmp, 0, !late;",
        "vote.sync.any.pred again, again, 0xffffffff;",
        "@again bra POLLS;",
        f"cvt.u32.u64 number, {status};",
        f"and.b32 number, number, {layout.STATUS_BYTES - 1};",
        *missed,
        "mov.u32 tmp, 1;",
        "membar.sys;",
        "@late st.volatile.global.u32 [block], tmp;",
        "exit;",
        "POLLS:",
        f"mov.u32 polls, {_POLLS};",
        "LOOP:",
        *poll,
        "vote.sync.any.pred any, any, 0xffffffff;",
        "sub.u32 polls, polls, 1;",
        "setp.ne.and.u32 bad, polls, 0, any;",
        "@bad bra LOOP;",
        "@any bra LOOK;",
    ]
    return "\n".join(lines)


@triton.constexpr_function
def _poll_asm(n):
    """PTX that loads one packet of each of `n` slots until no word of any is the sentinel.

    Operands: 4n outputs, then address of the packet in slot 0, slot stride, mask, slot to skip, timeout, status.
    """
    words = 4 * n
    address, stride, mask, skip, timeout, status = (f"${words + i}" for i in range(6))
    lines = ["{", _WAIT_REGISTERS]
    lines += [f".reg .pred use{i};" for i in range(n)] + [f".reg .u64 a{i};" for i in range(n)]
    lines += [f"mov.u32 ${i}, 0;" for i in range(words)]
    lines += [f"setp.ne.u32 active, {mask}, 0;", f"mov.u64 a0, {address};"]
    lines += [f"add.u64 a{i}, a{i - 1}, {stride};" for i in range(1, n)]
    lines += [f"setp.ne.and.s64 use{i}, {skip}, {i}, active;" for i in range(n)]
    poll, missed = [], []
    for i in range(n):
        outs = ", ".join(f"${4 * i + w}" for w in range(4))
        poll.append(f"@use{i} ld.relaxed.sys.global.v4.u32 {{{outs}}}, [a{i}];")
    for i in range(n):  # what has come is not asked for again; words that are not asked for are 0
        poll.append(f"setp.eq.u32 use{i}, ${4 * i}, 0x80000000;")
        poll += [f"setp.eq.or.u32 use{i}, ${4 * i + w}, 0x80000000, use{i};" for w in range(1, 4)]
        missed += [f"and.pred bad, use{i}, late;", f"@bad st.volatile.global.u32 [block+{4 + 4 * i}], number;"]
    poll.append("mov.pred any, use0;")
    poll += [f"or.pred any, any, use{i};" for i in range(1, n)]
    lines += [_bounded_loop(poll, missed, timeout, status), "}"]
    return "\n".join(lines)


@triton.constexpr_function
def _wait_asm():
    """PTX in which threads below 32 spin until their flag is at least the epoch.

    Operands: output, flag address, epoch, mask, rank behind the flag, timeout, status.
    """
    lines = ["{", _WAIT_REGISTERS, ".reg .s64 seen;"]
    lines += ["mov.u32 $0, 0;", "mov.u32 tmp, %tid.x;", "setp.ge.u32 bad, tmp, 32;", "@bad bra DONE;"]
    lines += ["setp.ne.u32 active, $3, 0;", "mov.u64 seen, $2;"]
    poll = ["@active ld.acquire.sys.global.s64 seen, [$1];", "setp.lt.s64 any, seen, $2;"]
    missed = [
        "mul.wide.u32 slot, $4, 4;",
        "add.u64 slot, slot, block;",
        "setp.lt.and.s64 bad, seen, $2, late;",
        "@bad st.volatile.global.u32 [slot+4], number;",
    ]
    lines += [_bounded_loop(poll, missed, "$5", "$6"), "DONE:", "}"]
    return "\n".join(lines)


@triton.jit
def as_mask(mask):
    """Interpreter: comparisons of scalars come out as integers there, which its loads refuse as masks."""
    return mask.to(tl.int32) != 0


@triton.jit
def load_packets(address, mask):
    """Four words of the packet at each `address` (16-byte aligned); 0 where `mask` is false."""
    if INTERPRET:
        p = address.to(tl.pointer_type(tl.int32))
        mask = as_mask(mask)
        return (
            tl.load(p, mask=mask, other=0),
            tl.load(p + 1, mask=mask, other=0),
            tl.load(p + 2, mask=mask, other=0),
            tl.load(p + 3, mask=mask, other=0),
        )
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            setp.ne.u32 p, $5, 0;
            mov.u32 $0, 0;
            mov.u32 $1, 0;
            mov.u32 $2, 0;
            mov.u32 $3, 0;
            @p ld.global.v4.u32 {$0, $1, $2, $3}, [$4];
            }""",
            "=&r,=&r,=&r,=&r,l,r",
            [address, mask.to(tl.int32)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )


@triton.jit
def store_packets(address, w0, w1, w2, w3, mask, REMOTE: tl.constexpr = False):
    """Store a packet to each `address` (16-byte aligned) where `mask`.

    REMOTE: relaxed at system scope, for addresses that a peer polls; else a plain store.
    """
    if INTERPRET:
        p = address.to(tl.pointer_type(tl.int32))
        mask = as_mask(mask)
        tl.store(p, w0, mask=mask)
        tl.store(p + 1, w1, mask=mask)
        tl.store(p + 2, w2, mask=mask)
        tl.store(p + 3, w3, mask=mask)
    else:
        if REMOTE:
            tl.inline_asm_elementwise(
                """{
                .reg .pred p;
                setp.ne.u32 p, $6, 0;
                mov.u32 $0, 0;
                @p st.relaxed.sys.global.v4.u32 [$1], {$2, $3, $4, $5};
                }""",
                "=&r,l,r,r,r,r,r",
                [address, w0, w1, w2, w3, mask.to(tl.int32)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        else:
            tl.inline_asm_elementwise(
                """{
                .reg .pred p;
                setp.ne.u32 p, $6, 0;
                mov.u32 $0, 0;
                @p st.global.v4.u32 [$1], {$2, $3, $4, $5};
                }""",
                "=&r,l,r,r,r,r,r",
                [address, w0, w1, w2, w3, mask.to(tl.int32)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )


@triton.jit
def _note_missing(ranks, missing, status):
    """Interpreter: fill in the status block for the `ranks` where `missing`."""
    block = (status & -_STATUS_BYTES).to(tl.pointer_type(tl.int32))
    caller = (status & (_STATUS_BYTES - 1)).to(tl.int32)
    tl.store(block + 1 + ranks, caller, mask=missing)
    tl.store(block, 1)


@triton.jit
def _polls_again(missing, ranks, start, timeout_ns, status):
    """Interpreter: False once nothing is missing, this wait is over its bound, or an earlier wait gave up."""
    again = tl.max(missing.to(tl.int32), axis=0) > 0
    if again:
        _yield_cpu()
        if tl.load((status & -_STATUS_BYTES).to(tl.pointer_type(tl.int32))) != 0:
            again = False
        elif _clock_ns() - start > timeout_ns:
            _note_missing(ranks, missing, status)
            again = False
    return again


@triton.jit
def poll_packets(address, slot_bytes, mask, skip, timeout_ns, status, WORLD_SIZE: tl.constexpr):
    """Wait for one packet of every slot and return 4 × WORLD_SIZE words, slot by slot.

    Args:
        address: int64 tensor, the packet's place in slot 0; slot i lies i × `slot_bytes` further.
        mask: packets to wait for; words elsewhere are 0.
        skip: the slot not to wait for (the caller's own); its words are 0.
        timeout_ns, status: see the module's text.
    """
    if INTERPRET:
        words = ()
        for i in tl.static_range(WORLD_SIZE):
            ranks = tl.zeros(address.shape, tl.int32) + i
            words = words + poll_from(address + i * slot_bytes, mask & (skip != i), ranks, timeout_ns, status)
        return words
    else:
        return tl.inline_asm_elementwise(
            _poll_asm(WORLD_SIZE),
            _outs(4 * WORLD_SIZE, "l,l,r,l,l,l"),
            [address, slot_bytes, mask.to(tl.int32), skip, timeout_ns, status],
            dtype=_u32s(4 * WORLD_SIZE),
            is_pure=False,
            pack=1,
        )


@triton.jit
def signal(flag_addresses, epoch, mask):
    """Write `epoch` to every flag where `mask`, after all that this block has done so far.

    Release at system scope by threads below 32 only; the caller's tensors must have at most 32 elements. What the whole
    block wrote, to its own memory or to peers', is visible to a peer that waits for this epoch.
    """
    if INTERPRET:
        p = flag_addresses.to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(p, epoch, mask=as_mask(mask), sem="release", scope="sys")
    else:
        tl.debug_barrier()
        tl.inline_asm_elementwise(
            """{
            .reg .pred p, q;
            .reg .u32 t;
            mov.u32 $0, 0;
            mov.u32 t, %tid.x;
            setp.lt.u32 q, t, 32;
            setp.ne.and.u32 p, $3, 0, q;
            @p st.release.sys.global.u64 [$1], $2;
            }""",
            "=&r,l,l,r",
            [flag_addresses, epoch, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def wait(flag_addresses, epoch, mask, ranks, timeout_ns, status):
    """Wait until every flag where `mask` is at least `epoch`; what came before its `signal` is visible from then on.

    `ranks` says which rank is behind each flag, for the status block.
    """
    if INTERPRET:
        p = flag_addresses.to(tl.pointer_type(tl.int64))
        mask = as_mask(mask)
        waiting = True
        start = _clock_ns()
        while waiting:
            seen = tl.load(p, mask=mask, other=0, volatile=True)
            waiting = _polls_again(mask & (seen < epoch), ranks, start, timeout_ns, status)
    else:
        tl.inline_asm_elementwise(
            _wait_asm(),
            "=&r,l,l,r,r,l,l",
            [flag_addresses, epoch, mask.to(tl.int32), ranks, timeout_ns, status],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        tl.debug_barrier()


@triton.jit
def fence_descriptors():
    """Let reads through tensor descriptors (TMA) that follow see what plain reads see now; after a `wait`."""
    if not INTERPRET:
        tl.inline_asm_elementwise(
            "{\nmov.u32 $0, 0;\nfence.proxy.async.global;\n}", "=r,r", [tl.zeros((1,), tl.int32)], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@triton.constexpr_function
def _wait_together_asm():
    """`_wait_asm` (whose text names stored rows) and a block barrier, by which all warps learn that one gave up."""
    alone = _wait_asm().removesuffix("}").replace("exit;", "setp.eq.u32 gone, 0, 0;\nbra DONE;")
    alone = alone.replace(_WAIT_REGISTERS, _WAIT_REGISTERS + "\n.reg .pred gone;\nsetp.ne.u32 gone, 0, 0;")
    return alone + "bar.red.or.pred gone, 0, gone;\n@gone exit;\n}"


@triton.jit
def wait_together(flag_addresses, epoch, mask, ranks, timeout_ns, status):
    """`wait` for warps that need each other, in products of matrices say: if one gives up, the whole block leaves."""
    if INTERPRET:
        wait(flag_addresses, epoch, mask, ranks, timeout_ns, status)
    else:
        tl.inline_asm_elementwise(
            _wait_together_asm(), "=&r,l,l,r,r,l,l",
            [flag_addresses, epoch, mask.to(tl.int32), ranks, timeout_ns, status], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


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
                ranks = tl.zeros(word.shape, tl.int32) + i
                waiting = _polls_again(word == SENTINEL, ranks, start, timeout_ns, status)
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
def _poll_both_asm(n):
    """PTX that loads one packet and one word of each of `n` slots until no word of any is the sentinel.

    Operands: 5n outputs, then address of the packet in slot 0, slot stride, address of the word in slot 0, slot stride,
    mask, slot to skip, timeout, status.
    """
    words = 5 * n
    address, stride, beside, beside_stride, mask, skip, timeout, status = (f"${words + i}" for i in range(8))
    lines = ["{", _WAIT_REGISTERS]
    lines += [f".reg .pred use{i};" for i in range(n)] + [f".reg .u64 a{i}, b{i};" for i in range(n)]
    lines += [f"mov.u32 ${i}, 0;" for i in range(words)]
    lines += [f"setp.ne.u32 active, {mask}, 0;", f"mov.u64 a0, {address};", f"mov.u64 b0, {beside};"]
    for i in range(1, n):
        lines += [f"add.u64 a{i}, a{i - 1}, {stride};", f"add.u64 b{i}, b{i - 1}, {beside_stride};"]
    lines += [f"setp.ne.and.s64 use{i}, {skip}, {i}, active;" for i in range(n)]
    poll, missed = [], []
    for i in range(n):
        outs = ", ".join(f"${5 * i + w}" for w in range(4))
        poll.append(f"@use{i} ld.relaxed.sys.global.v4.u32 {{{outs}}}, [a{i}];")
        poll.append(f"@use{i} ld.relaxed.sys.global.u32 ${5 * i + 4}, [b{i}];")
    for i in range(n):
        poll.append(f"setp.eq.u32 use{i}, ${5 * i}, 0x80000000;")
        poll += [f"setp.eq.or.u32 use{i}, ${5 * i + w}, 0x80000000, use{i};" for w in range(1, 5)]
        missed += [f"and.pred bad, use{i}, late;", f"@bad st.volatile.global.u32 [block+{4 + 4 * i}], number;"]
    poll.append("mov.pred any, use0;")
    poll += [f"or.pred any, any, use{i};" for i in range(1, n)]
    lines += [_bounded_loop(poll, missed, timeout, status), "}"]
    return "\n".join(lines)


@triton.jit
def poll_packets_and_words(
    address, slot_bytes, beside, beside_bytes, mask, skip, timeout_ns, status, WORLD_SIZE: tl.constexpr
):  # fmt: skip
    """`poll_packets` of packets that have a word beside them; 5 × WORLD_SIZE words, slot by slot, the word last.

    Args:
        beside: int64 tensor, the word's place in slot 0; slot i lies i × `beside_bytes` further. Packets may share a
            word; those of one warp have all read it when the call ends.
        address, slot_bytes, mask, skip, timeout_ns, status: as for `poll_packets`.
    """
    if INTERPRET:
        words = ()
        for i in tl.static_range(WORLD_SIZE):
            ranks = tl.zeros(address.shape, tl.int32) + i
            words = words + poll_from(address + i * slot_bytes, mask & (skip != i), ranks, timeout_ns, status)
            slots = (mask & (skip != i)).to(tl.int32) << i
            words = words + (poll_words(beside, beside_bytes, slots, timeout_ns, status, WORLD_SIZE)[i],)
        return words
    else:
        return tl.inline_asm_elementwise(
            _poll_both_asm(WORLD_SIZE),
            _outs(5 * WORLD_SIZE, "l,l,l,l,r,l,l,l"),
            [address, slot_bytes, beside, beside_bytes, mask.to(tl.int32), skip, timeout_ns, status],
            dtype=_u32s(5 * WORLD_SIZE),
            is_pure=False,
            pack=1,
        )


@triton.constexpr_function
def _poll_wires_asm(peers, items, step):
    """PTX that loads `items` packets, `step` bytes apart, and one beside them of each of `peers` slots until all come.

    Operands: 4 · (items + 1) · peers outputs, then address of the first packet in slot 0, address of the packet beside,
    slot stride, wanted packets as bits, the rank before the one that fills slot 0, timeout, status.
    """
    each = items + 1
    count = peers * each
    address, beside, stride, wanted, rank, timeout, status = (f"${4 * count + i}" for i in range(7))
    lines = ["{", _WAIT_REGISTERS, ".reg .u32 bit;"]
    lines += [f".reg .pred use{i};" for i in range(count)] + [f".reg .u64 a{t}, b{t};" for t in range(peers)]
    lines += [f"mov.u32 ${i}, 0;" for i in range(4 * count)] + [f"mov.u64 a0, {address};", f"mov.u64 b0, {beside};"]
    for t in range(1, peers):
        lines += [f"add.u64 a{t}, a{t - 1}, {stride};", f"add.u64 b{t}, b{t - 1}, {stride};"]
    poll, missed = [], []
    for i in range(count):
        t, item = divmod(i, each)
        outs = ", ".join(f"${4 * i + w}" for w in range(4))
        lines += [f"and.b32 bit, {wanted}, {1 << item if item < items else 1};", f"setp.ne.u32 use{i}, bit, 0;"]
        place = f"a{t}+{item * step}" if item < items else f"b{t}"
        poll.append(f"@use{i} ld.relaxed.sys.global.v4.u32 {{{outs}}}, [{place}];")
        missed += [f"cvt.u32.u64 tmp, {rank};", f"add.u32 tmp, tmp, {t + 1};", f"setp.gt.u32 bad, tmp, {peers};"]
        missed += [f"@bad sub.u32 tmp, tmp, {peers + 1};", "mul.wide.u32 slot, tmp, 4;", "add.u64 slot, slot, block;"]
        missed += [f"and.pred bad, use{i}, late;", "@bad st.volatile.global.u32 [slot+4], number;"]
    for i in range(count):
        poll.append(f"setp.eq.u32 use{i}, ${4 * i}, 0x80000000;")
        poll += [f"setp.eq.or.u32 use{i}, ${4 * i + w}, 0x80000000, use{i};" for w in range(1, 4)]
    poll.append("mov.pred any, use0;")
    poll += [f"or.pred any, any, use{i};" for i in range(1, count)]
    lines += [_bounded_loop(poll, missed, timeout, status), "}"]
    return "\n".join(lines)


@triton.jit
def poll_wires(
    address, beside, slot_bytes, wanted, rank, timeout_ns, status,
    PEERS: tl.constexpr, ITEMS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Wait for ITEMS packets and one beside them of every slot; 4 · (ITEMS + 1) · PEERS words, slot by slot.

    All loads come before the first comparison, and again for those that have not come.

    Args:
        address, beside: int64 tensors, the places of the first packet and of the one beside in slot 0, which rank
            `rank` + 1 fills; slot t lies t × `slot_bytes` further, packet j of it j × STEP. Threads of a warp may share
            the packet beside: all of them have read it when the call ends.
        wanted: int32 tensor, bit j for packet j; bit 0 also for the packet beside. Words of others are 0.
        timeout_ns, status: see the module's text.
    """
    if INTERPRET:
        words = ()
        for t in tl.static_range(PEERS):
            ranks = tl.zeros(address.shape, tl.int32) + ((rank + 1 + t) % (PEERS + 1)).to(tl.int32)
            for j in tl.static_range(ITEMS):
                place = address + t * slot_bytes + j * STEP
                words = words + poll_from(place, (wanted & (1 << j)) != 0, ranks, timeout_ns, status)
            words = words + poll_from(beside + t * slot_bytes, (wanted & 1) != 0, ranks, timeout_ns, status)
        return words
    else:
        return tl.inline_asm_elementwise(
            _poll_wires_asm(PEERS, ITEMS, STEP),
            _outs(4 * (ITEMS + 1) * PEERS, "l,l,l,r,l,l,l"),
            [address, beside, slot_bytes, wanted, rank, timeout_ns, status],
            dtype=_u32s(4 * (ITEMS + 1) * PEERS),
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
            waiting = _polls_again(missing, ranks, start, timeout_ns, status)
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
