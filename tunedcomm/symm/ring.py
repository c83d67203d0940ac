"""A ring of slots in the host's shared memory, through which the ranks of a group exchange CPU tensors.

Every rank has `SLOTS` slots of `SLOT_BYTES` and two words, each on a cache line of its own. A *step* is one use of a
slot, numbered from 1 on in the order in which the group's calls use them, which is the same on every rank; step s uses
slot s mod `SLOTS` of every rank. A rank

1. `claim`s a step: waits until every peer has read the slot's former step, s − `SLOTS`;
2. writes its slot and `publish`es the step: its word *ready* becomes s;
3. `wait`s until every peer's *ready* is at least s, and reads their slots;
4. `release`s the step: its word *read* becomes s. Steps are released in order.

So no slot is overwritten that a late reader still needs, whatever the ops do between the four. A rank may claim up to
`SLOTS` − 1 steps before it reads the first of them: that is how copies and sums of several chunks overlap.

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
waits sleep at once. Waiting ends with `PeerTimeoutError` after the group's time-out.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Sequence

import numpy as np
import torch.distributed as dist

from tunedcomm.errors import PeerTimeoutError
from tunedcomm.symm.buffer import allocate_on_host
from tunedcomm.symm.layout import RING_SLOT_BYTES as SLOT_BYTES
from tunedcomm.symm.layout import RING_SLOTS as SLOTS

_READY, _READ = 0, 64  # offsets of a rank's two words
_SLOTS_AT = 4096
_WORD = 8
_SLEEP_AFTER_NS, _SLEEP_S = 5_000_000, 0.00002
_LONG_YIELD_NS, _SLEEPY_WAITS = 1_000_000, 100
_IS_STRONGLY_ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i686")
_fence_lock = threading.local()


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
        timeout_ns: bound of every wait.

    Attributes:
        lock: held for the length of a call.
        rank, world_size: the caller's place in the group.
        status: word 0 becomes 1 when a wait is given up, for callers that look before each call.

    Raises:
        WorkspaceError: /dev/shm has no room for the slots, or a rank cannot map them; on every rank.
    """

    def __init__(self, group: dist.ProcessGroup, *, timeout_ns: int) -> None:
        buffer = allocate_on_host(group, _SLOTS_AT + SLOTS * SLOT_BYTES)
        self.rank = buffer.rank
        self.world_size = buffer.world_size
        self.lock = threading.Lock()
        self._timeout_ns = timeout_ns
        starts = [address - buffer.addresses[0] for address in buffer.addresses]
        self._slots = [[start + _SLOTS_AT + k * SLOT_BYTES for k in range(SLOTS)] for start in starts]
        self._base = buffer.addresses[0]
        assert not self._base % _WORD, "mappings begin at a page"
        self._mapping = memoryview(buffer.owner)  # type: ignore[arg-type]
        self._words = self._mapping.cast("q")
        # From the next rank on, so that not all ranks look at the same peer first.
        self._peers = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        self._ready = [(start + _READY) // _WORD for start in starts]
        self._read = [(start + _READ) // _WORD for start in starts]
        self._peers_ready = [self._ready[peer] for peer in self._peers]
        self._my_ready, self._my_read = self._ready[self.rank], self._read[self.rank]
        self._step = 0
        self._freed = 0  # every peer is known to have read the steps up to this one
        self._sleepy = 0  # waits to come that do not yield
        self._lost = ""
        self.status = memoryview(bytearray(1))

    def check_peers(self) -> None:
        """Raise if an earlier call was given up.

        Raises:
            PeerTimeoutError: as in that call. The group's steps are out of order from then on.
        """
        if self._lost:
            raise PeerTimeoutError(self._lost)

    def address(self, rank: int, slot: int) -> int:
        """The address of a rank's slot in this process."""
        return self._base + self._slots[rank][slot]

    def view(self, rank: int, slot: int, first: int, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Bytes of a rank's slot, from `first` on."""
        return np.frombuffer(self._mapping, np.uint8, nbytes, self._slots[rank][slot] + first)

    def claim(self, op: str) -> int:
        """The next step; its slot may be written.

        Raises:
            PeerTimeoutError: a peer has not read the slot's former step, or an earlier call was given up.
        """
        step = self._step + 1
        if step - SLOTS > self._freed:
            self._free(step - SLOTS, op)
        self._step = step
        return step

    def publish(self, step: int) -> None:
        """Tell the peers that the slot of `step` is written."""
        if not _IS_STRONGLY_ORDERED:
            _fence()
        self._words[self._my_ready] = step

    def wait(self, step: int, spins: int, op: str) -> None:
        """Wait until every peer has published `step`.

        Args:
            step: one that this rank has published.
            spins: looks at a word before the core is yielded between them.
            op: for the error.

        Raises:
            PeerTimeoutError: a peer did not come.
        """
        words = self._words
        for place in self._peers_ready:
            if words[place] < step:
                self._await(place, step, spins, op)
        if not _IS_STRONGLY_ORDERED:
            _fence()

    def release(self, step: int) -> None:
        """Tell the peers that this rank reads their slots of `step` no more."""
        if not _IS_STRONGLY_ORDERED:
            _fence()
        self._words[self._my_read] = step

    def _free(self, step: int, op: str) -> None:
        for peer in self._peers:
            self._await(self._read[peer], step, 0, op)
        self._freed = min((self._words[self._read[peer]] for peer in self._peers), default=step)
        if not _IS_STRONGLY_ORDERED:
            _fence()

    def _await(self, place: int, step: int, spins: int, op: str) -> None:
        words = self._words
        for _ in range(spins):
            if words[place] >= step:
                return
        self.check_peers()
        begin = now = time.monotonic_ns()
        self._sleepy = max(self._sleepy - 1, 0)
        while words[place] < step:
            if self._sleepy or now - begin > _SLEEP_AFTER_NS:
                time.sleep(_SLEEP_S)
                now = time.monotonic_ns()
            else:
                os.sched_yield()
                before, now = now, time.monotonic_ns()
                if now - before > _LONG_YIELD_NS:
                    self._sleepy = _SLEEPY_WAITS
            if now - begin > self._timeout_ns and words[place] < step:
                self._give_up(self._read if place in self._read else self._ready, step, op)

    def _give_up(self, places: Sequence[int], step: int, op: str) -> None:
        missed = [str(peer) for peer in sorted(self._peers) if self._words[places[peer]] < step]
        self._lost = (
            f"rank {self.rank} waited more than {self._timeout_ns / 1e9:g} s for its peers: {op} missed rank "
            f"{', '.join(missed)} of the group of {self.world_size}. Such a rank died, or did not make the same call. "
            "The group cannot be used any more; make a new process group, or raise TUNEDCOMM_PEER_TIMEOUT_S if the "
            "peer was only slow"
        )
        self.status[0] = 1
        raise PeerTimeoutError(self._lost)
