"""A ring of slots in the host's shared memory, through which the ranks of a group exchange CPU tensors.

Every rank has `SLOTS` slots of `SLOT_BYTES`, and words on three cache lines. An *epoch* is one use of a slot. Epochs
count from 1, in the order in which the group's calls use slots, which is the same on every rank. Epoch e uses slot
e mod `SLOTS` of every rank. A rank

1. `claim`s an epoch: waits until every peer has read the slot's former epoch, e − `SLOTS`;
2. writes its slot and `publish`es the epoch: the slot's word *ready* becomes e with the call's code;
3. `wait`s until the slot's *ready* of every peer is the same word, and reads their slots;
4. `release`s the epoch: its word *read* becomes e. Epochs are released in order.

Where a peer has published the epoch with another code, it made another call: the group ends with `AgreementError` on
every rank, and no rank reads the slots. The code stands for op, shape, dtype and options; it travels
in the word that is looked at anyway, so comparing it takes no access of its own.

So no slot is overwritten that a late reader still needs, whatever the ops do between the four. A rank may claim up to
`SLOTS` − 1 epochs before it reads the first of them: that is how copies and sums of several chunks overlap.

The last word, *arrived*, serves asynchronous calls: `all_arrived` sets it to the first epoch of the call that this
rank begins. A call that every rank has begun ends without further help of the program, so it may block its caller.

**Memory order.** What is written before `publish` must be seen after `wait`, and what is read before `release` must not
be read later than a peer writes after `claim`. Words are aligned and of eight bytes, which CPython stores and loads
through `memoryview` with one instruction. Each access is a call of its own into the interpreter, so compilers move
nothing across. x86 then keeps stores in order, loads in order, and loads before later stores (TSO), which is all that
is needed: no rank waits for a peer to see a word before the rank reads one. ARM and others may reorder: there a lock
that is released and acquired again stands at the four places. Release stores with release semantics and acquire
loads with acquire semantics; one alone would let later or earlier accesses pass, but an acquire cannot pass an earlier
release, so that the pair in this order keeps everything before it before everything after it.

**Waiting** spins for a while, then yields the core at every look, so that more ranks than cores make progress, and
sleeps between looks when a peer is late by more than a few milliseconds. Where a yield takes long, other programs want
the core: who yields to them waits for all their time slices, while the scheduler lets a sleeper in at once. So the next
waits sleep at once. They also do while another thread of this process has calls to make, for a yield keeps the
interpreter's lock. Waiting ends with `PeerTimeoutError` after the group's time-out, and when the group has ended
(`symm.control`). An epoch that a peer had published by then is used all the same.
"""

from __future__ import annotations

import os
import platform
import threading
import time
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch.distributed as dist

from tunedcomm.errors import PeerTimeoutError
from tunedcomm.spec import Problem, format_shape
from tunedcomm.symm.buffer import allocate_on_host
from tunedcomm.symm.control import Control, refuse_nested
from tunedcomm.symm.exchange import AFTERWARDS
from tunedcomm.symm.layout import RING_SLOT_BYTES as SLOT_BYTES
from tunedcomm.symm.layout import RING_SLOTS as SLOTS

_READY, _READ, _ARRIVED = 0, 64, 128  # offsets of a rank's words; it has one *ready* for each slot
_EPOCH_BITS, _CODE_BITS = 43, 20  # of a word *ready*, whose upper bits are the call's code
_EPOCH = (1 << _EPOCH_BITS) - 1
_SLOTS_AT = 4096
_WORD = 8
_SLEEP_AFTER_NS, _SLEEP_S = 5_000_000, 0.00002
_LONG_YIELD_NS, _SLEEPY_WAITS = 1_000_000, 100
_IS_STRONGLY_ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i686")
_fence_lock = threading.local()
# Not empty while a thread beside the program's makes calls of a group.
background: list[bool] = []


class Call(NamedTuple):
    """A call as the ring sees it.

    Attributes:
        what: op, shape, dtype and options, for errors.
        code: a hash of `what`, in the upper bits of a word.
        spins: looks at a word before the core is yielded between them.
    """

    what: str
    code: int
    spins: int = 1

    @classmethod
    def of(cls, problem: Problem, spins: int = 1, option: str = "") -> Call:
        """The call of a problem; `option` is one that no field of the problem has."""
        fields = (problem.dtype, problem.reduction, problem.layout, problem.scaling, option)
        what = " ".join(filter(None, (problem.op, format_shape(problem.shape), *fields)))
        return cls(what, zlib.crc32(what.encode()) % (1 << _CODE_BITS) << _EPOCH_BITS, spins)


def _fence() -> None:
    """Keep accesses before the call before those after it, on machines that reorder; see the module's docstring."""
    lock = getattr(_fence_lock, "lock", None)
    if lock is None:
        lock = _fence_lock.lock = threading.Lock()
        lock.acquire()
    lock.release()
    lock.acquire()


class HostRing:
    """One group's ring; making it is collective over the group.

    Calls of one ring follow each other: the caller holds `lock` for the length of a call, so that threads of one rank
    take turns. They must come in the same order on every rank, as for any collective.

    Args:
        group: process group whose ranks run on one host.
        control: the group's control block.

    Attributes:
        lock: held for the length of a call.
        rank, world_size: the caller's place in the group.
        scratch: six slots' bytes of this process, for a call's sums.

    Raises:
        WorkspaceError: /dev/shm has no room for the slots, or a rank cannot map them; on every rank.
    """

    def __init__(self, group: dist.ProcessGroup, control: Control) -> None:
        buffer = allocate_on_host(group, _SLOTS_AT + SLOTS * SLOT_BYTES)
        self.rank = buffer.rank
        self.world_size = buffer.world_size
        self.lock = threading.RLock()  # a call within a call must get as far as `begin`, which refuses it
        self.control = control
        self._status = control.status
        starts = [address - buffer.addresses[0] for address in buffer.addresses]
        self._slots = [[start + _SLOTS_AT + k * SLOT_BYTES for k in range(SLOTS)] for start in starts]
        self._base = buffer.addresses[0]
        assert not self._base % _WORD, "mappings begin at a page"
        self._mapping = memoryview(buffer.owner)  # type: ignore[arg-type]
        self._words = self._mapping.cast("q")
        # From the next rank on, so that not all ranks look at the same peer first.
        self._peers = [(self.rank + turn) % self.world_size for turn in range(1, self.world_size)]
        self._ready = [[(start + _READY) // _WORD + slot for start in starts] for slot in range(SLOTS)]
        self._read = [(start + _READ) // _WORD for start in starts]
        # By slot, where this rank says that it is ready, and where its peers do.
        self._says_ready = [(places[self.rank], [places[peer] for peer in self._peers]) for places in self._ready]
        arrived = [(start + _ARRIVED) // _WORD for start in starts]
        self._my_arrived, self._peers_arrived = arrived[self.rank], [arrived[peer] for peer in self._peers]
        self._my_read = self._read[self.rank]
        self._epoch = self._released = 0
        self._freed = 0  # every peer is known to have read the epochs up to this one
        # Calls of a ring follow each other, so the sums of all their sizes share this memory.
        self.scratch = np.empty(6 * SLOT_BYTES, np.uint8)
        self._sleepy = 0  # waits to come that do not yield

    def address(self, rank: int, slot: int) -> int:
        """The address of a rank's slot in this process."""
        return self._base + self._slots[rank][slot]

    def view(self, rank: int, slot: int, first: int, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Bytes of a rank's slot, from `first` on."""
        return np.frombuffer(self._mapping, np.uint8, nbytes, self._slots[rank][slot] + first)

    def all_arrived(self, patience_ns: int) -> bool:
        """Tell the peers that this rank begins the group's next call; True if all of them begin it in `patience_ns`."""
        epoch, words, end_ns = self._epoch + 1, self._words, 0
        words[self._my_arrived] = epoch
        for ready, arrived in zip(self._says_ready[epoch % SLOTS][1], self._peers_arrived, strict=True):
            while words[ready] & _EPOCH < epoch and words[arrived] < epoch:
                end_ns = end_ns or time.monotonic_ns() + patience_ns
                if time.monotonic_ns() > end_ns:
                    return False
                os.sched_yield()
        return True

    def begin(self, call: Call) -> int:
        """Begin a call: its first epoch, as by `claim`.

        Raises:
            GroupError: a call of the group is under way on this thread.
        """
        if self._released != self._epoch or self.control.interpreting:
            self._begin_among_others(call.what)
        epoch = self._epoch + 1
        if epoch - SLOTS > self._freed:
            self._free(epoch - SLOTS, call)
        self._epoch = epoch
        return epoch

    def _begin_among_others(self, op: str) -> None:
        self.control.check()
        self.lock.release()
        is_nested = self.is_mine() or self.control.interpreting == threading.get_ident()
        self.lock.acquire()
        if is_nested:
            refuse_nested(op)
        if self._released != self._epoch:
            self.control.abort(f"rank {self.rank} left a call on another thread by an exception. {AFTERWARDS}")
            self.control.check()

    def is_mine(self) -> bool:
        """True if this thread holds the lock, so that a call is under way on it."""
        return bool(self.lock._is_owned())  # type: ignore[attr-defined]  # threading.Condition uses it, too

    def claim(self, call: Call) -> int:
        """The next epoch; its slot may be written.

        Raises:
            PeerTimeoutError, GroupAbortedError: a peer has not read the slot's former epoch.
        """
        epoch = self._epoch + 1
        if epoch - SLOTS > self._freed:
            self._free(epoch - SLOTS, call)
        self._epoch = epoch
        return epoch

    def publish(self, epoch: int, call: Call) -> None:
        """Tell the peers that the slot of `epoch` is written."""
        if not _IS_STRONGLY_ORDERED:
            _fence()
        self._words[self._says_ready[epoch % SLOTS][0]] = call.code + epoch

    def wait(self, epoch: int, call: Call) -> None:
        """Wait until every peer has published `epoch`, which this rank has published.

        Raises:
            PeerTimeoutError, GroupAbortedError: a peer did not come.
            AgreementError: a peer made another call.
        """
        words, word = self._words, call.code + epoch
        for place in self._says_ready[epoch % SLOTS][1]:
            if words[place] != word:
                self._await_word(place, word, call)
        if not _IS_STRONGLY_ORDERED:
            _fence()

    def exchange(self, slot: int, word: int, call: Call) -> None:
        """`publish`, then `wait`, in one call: at 1 KiB a call of Python's is 1 % of a collective.

        Args:
            slot: of the epoch.
            word: the call's code plus the epoch.
            call: what is called.
        """
        if not _IS_STRONGLY_ORDERED:
            _fence()
        words, (own, peers) = self._words, self._says_ready[slot]
        words[own] = word
        for place in peers:
            if words[place] != word:
                self._await_word(place, word, call)
        if not _IS_STRONGLY_ORDERED:
            _fence()

    def release(self, epoch: int) -> None:
        """Tell the peers that this rank reads their slots of `epoch` no more."""
        if not _IS_STRONGLY_ORDERED:
            _fence()
        self._words[self._my_read] = self._released = epoch

    def meet(self, call: Call) -> None:
        """Wait until every peer has come to the same call.

        A rank that is interrupted between here and the library's own exchange leaves its peers there until the library
        gives up: some microseconds that no word can cover.
        """
        with self.lock:
            epoch = self.begin(call)
            self.exchange(epoch % SLOTS, call.code + epoch, call)
            self.control.check()
            self.release(epoch)

    def _free(self, epoch: int, call: Call) -> None:
        for peer in self._peers:
            self._await(self._read, peer, epoch, call.what)
        self._freed = min((self._words[self._read[peer]] for peer in self._peers), default=epoch)
        if not _IS_STRONGLY_ORDERED:
            _fence()

    def _await_word(self, place: int, word: int, call: Call) -> None:
        words = self._words
        for _ in range(call.spins):
            if words[place] == word:
                return
        epoch = word - call.code
        places = self._ready[epoch % SLOTS]
        self._await(places, places.index(place), epoch, call.what)
        if self._words[place] != word:
            self.control.disagree(call.what)

    def _await(self, places: Sequence[int], peer: int, epoch: int, what: str) -> None:
        """Wait until a peer's word has come to `epoch`."""
        words, place = self._words, places[peer]
        begin = now = time.monotonic_ns()
        self._sleepy = max(self._sleepy - 1, 0)
        while words[place] & _EPOCH < epoch:
            if self._status[0] and words[place] & _EPOCH < epoch:  # looked at in this order
                self.control.check(what)
            if self._sleepy or background or now - begin > _SLEEP_AFTER_NS:
                time.sleep(_SLEEP_S)
                now = time.monotonic_ns()
            else:
                os.sched_yield()
                before, now = now, time.monotonic_ns()
                if now - before > _LONG_YIELD_NS:
                    self._sleepy = _SLEEPY_WAITS
            if now - begin > self.control.timeout_ns and words[place] & _EPOCH < epoch:
                missed = [str(each) for each in sorted(self._peers) if words[places[each]] & _EPOCH < epoch]
                text = self.control.timeout_text(f"{what} (called eagerly) missed rank {', '.join(missed)}")
                self.control.abort(text, timed_out=True)
                raise PeerTimeoutError(text)
