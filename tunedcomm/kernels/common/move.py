"""Payloads that are moved and not reduced: bytes of any kind, at any alignment, with no bit changed.

**Alignment.** Chunks of a message begin at multiples of its size, which need not be a multiple of 16. `ALIGN` is the
greatest power of two up to 16 that divides it (`alignment_of`): packets are read and written in pieces of so many bytes
and nothing outside a chunk is touched. With 16 that is one access a packet. An input that is read as one chunk starts
at a multiple of 16 and is read by whole packets whatever its size: what a packet holds behind the end lies in the same
16 bytes, so it is there to be read, and is never written anywhere.

**Escapes.** A Lamport packet must not hold the sentinel, and here every bit counts, −0.0 included. A word that is the
sentinel travels as `ESCAPE`. A packet with an `ESCAPE` in it, its own or a payload's, is followed by a remark: one word
in an area of its own, whose bit w says that word w was the sentinel. A remark is below 16, so it cannot be the sentinel
either. Receivers poll for a remark where they find an `ESCAPE`; payloads without one cost no more than the question.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm.kernels.common.sync import INTERPRET, SENTINEL, as_mask, load_packets, store_packets

__all__ = ["ESCAPE", "alignment_of"]

ESCAPE = tl.constexpr(-0x7FFFFFFF)  # as int32; a word that hardly any payload holds: −0.0 beside a subnormal


def alignment_of(nbytes: int) -> int:
    """The constant `ALIGN` for chunks of `nbytes`: 16, 4, 2 or 1."""
    return next(align for align in (16, 4, 2, 1) if nbytes % align == 0)


@triton.jit
def _load_piece(address, left, OFFSET: tl.constexpr, mask, ALIGN: tl.constexpr):
    """`ALIGN` bytes at `OFFSET` of a packet as an int32, without sign; 0 from `left` on."""
    here = mask & (left > OFFSET)
    if ALIGN == 4:
        return tl.load((address + OFFSET).to(tl.pointer_type(tl.int32)), mask=here, other=0)
    elif ALIGN == 2:
        return tl.load((address + OFFSET).to(tl.pointer_type(tl.int16)), mask=here, other=0).to(tl.int32) & 0xFFFF
    else:
        return tl.load((address + OFFSET).to(tl.pointer_type(tl.int8)), mask=here, other=0).to(tl.int32) & 0xFF


@triton.jit
def _load_word(address, left, WORD: tl.constexpr, mask, ALIGN: tl.constexpr):
    word = _load_piece(address, left, 4 * WORD, mask, ALIGN)
    for i in tl.static_range(1, 4 // ALIGN):
        word |= _load_piece(address, left, 4 * WORD + i * ALIGN, mask, ALIGN) << (8 * ALIGN * i)
    return word


@triton.jit
def load_bytes(address, left, mask, ALIGN: tl.constexpr):
    """Four words of the packet at each `address`, of which `left` bytes belong to the chunk; 0 where not `mask`."""
    if INTERPRET:
        mask = as_mask(mask)
    if ALIGN == 16:
        return load_packets(address, mask)
    else:
        return (
            _load_word(address, left, 0, mask, ALIGN),
            _load_word(address, left, 1, mask, ALIGN),
            _load_word(address, left, 2, mask, ALIGN),
            _load_word(address, left, 3, mask, ALIGN),
        )


@triton.jit
def _store_word_bytes(address, left, word, WORD: tl.constexpr, mask, ALIGN: tl.constexpr):
    for i in tl.static_range(4 // ALIGN):
        here = mask & (left > 4 * WORD + i * ALIGN)
        piece = word >> (8 * ALIGN * i)
        at = address + (4 * WORD + i * ALIGN)
        if ALIGN == 4:
            tl.store(at.to(tl.pointer_type(tl.int32)), piece, mask=here)
        elif ALIGN == 2:
            tl.store(at.to(tl.pointer_type(tl.int16)), piece.to(tl.int16), mask=here)
        else:
            tl.store(at.to(tl.pointer_type(tl.int8)), piece.to(tl.int8), mask=here)


@triton.jit
def store_bytes(address, left, w0, w1, w2, w3, mask, ALIGN: tl.constexpr):
    """Inverse of `load_bytes`; nothing behind the chunk is touched."""
    if INTERPRET:
        mask = as_mask(mask)
    if ALIGN == 16:
        store_packets(address, w0, w1, w2, w3, mask)
    else:
        _store_word_bytes(address, left, w0, 0, mask, ALIGN)
        _store_word_bytes(address, left, w1, 1, mask, ALIGN)
        _store_word_bytes(address, left, w2, 2, mask, ALIGN)
        _store_word_bytes(address, left, w3, 3, mask, ALIGN)


@triton.jit
def escape(w):
    """The word as it travels."""
    return tl.where(w == SENTINEL, ESCAPE, w)


@triton.jit
def has_escape(w0, w1, w2, w3):
    """True for packets, as they travel, that have a remark."""
    return (w0 == ESCAPE) | (w1 == ESCAPE) | (w2 == ESCAPE) | (w3 == ESCAPE)


@triton.jit
def remark_of(w0, w1, w2, w3):
    """The remark of a packet, from its words before they were escaped."""
    low = (w0 == SENTINEL).to(tl.int32) | ((w1 == SENTINEL).to(tl.int32) << 1)
    return low | ((w2 == SENTINEL).to(tl.int32) << 2) | ((w3 == SENTINEL).to(tl.int32) << 3)


@triton.jit
def remarked_slots(words, WORLD_SIZE: tl.constexpr):
    """Bits of the slots, for `poll_words`, whose packets (4 words each) have a remark."""
    bits = has_escape(words[0], words[1], words[2], words[3]).to(tl.int32)
    for i in tl.static_range(1, WORLD_SIZE):
        marked = has_escape(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3])
        bits |= marked.to(tl.int32) << i
    return bits


@triton.jit
def restore(w, remark, WORD: tl.constexpr):
    """Word `WORD` of a packet as it was before it was escaped."""
    return tl.where((w == ESCAPE) & (((remark >> WORD) & 1) != 0), SENTINEL, w)
