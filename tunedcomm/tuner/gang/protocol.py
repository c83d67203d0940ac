"""The line between the supervisor and rank 0 of a gang: a Unix socket in the gang's folder, JSON lines both ways.

Commands go down, see `commands.Command`. Events come up, all with `event`, the name:

    ready    environment, limits
    work     candidate             the tensors for a problem are made, the library is bound beside the candidate
    trial    candidate             it is about to be bound
    run      candidate             every rank has bound it; launches begin
    result   outcome               how the trial ended
    end      reason                nothing follows: `done`, `budget`, or `unusable` where ranks may be out of step

What a gang wrote before it died is still there to be read. Besides, a rank on which a launch raised leaves
`failure-<rank>.json` before anything else happens to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["GangEnd", "SupervisorEnd", "failure_age_s", "read_failures", "write_failure"]

_NAME = "socket"
_CHUNK = 1 << 16


@contextlib.contextmanager
def _address(folder: Path) -> Iterator[str]:
    """Where the socket is. Through a descriptor: the path itself may be longer than an address may be."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{_NAME}"
    finally:
        os.close(descriptor)


def _line(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode() + b"\n"


class SupervisorEnd:
    """The supervisor's end; never blocks.

    Args:
        folder: of the gang.
        selector: the socket is registered here, and stays so until it is closed by either side.
        data: what the selector is to say about it.

    Attributes:
        closed: the gang's end is gone and everything that it wrote has been read.
    """

    def __init__(self, folder: Path, selector: selectors.BaseSelector, data: object) -> None:
        self.closed = False
        self._selector, self._data = selector, data
        self._buffer = b""
        self._connection: socket.socket | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _address(folder) as address:
            self._listener.bind(address)
        self._listener.listen(1)
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, data)

    def _accept(self) -> socket.socket | None:
        with contextlib.suppress(BlockingIOError):
            self._connection, _ = self._listener.accept()
            self._connection.setblocking(False)
            self._forget(self._listener)
            self._selector.register(self._connection, selectors.EVENT_READ, self._data)
        return self._connection

    def read(self) -> list[dict[str, Any]]:
        """Events that have come since the last call, oldest first; a line that is not yet whole waits."""
        connection = self._connection or self._accept()
        while connection is not None and not self.closed:
            try:
                data = connection.recv(_CHUNK)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            if not data:
                self.closed = True
                self._forget(connection)
            self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines]

    def send(self, command: Mapping[str, Any]) -> None:
        """Send a command; to nobody if the gang is gone, whose death is seen elsewhere."""
        # A gang reads each command before it answers, so that there is always room for one.
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            if self._connection is not None and not self.closed:
                self._connection.sendall(_line(command))

    def close(self) -> None:
        """Close it; what has not been read is lost."""
        self.closed = True
        self._forget(self._listener)
        if self._connection is not None:
            self._forget(self._connection)

    def _forget(self, one: socket.socket) -> None:
        if one.fileno() >= 0:
            self._selector.unregister(one)
            one.close()


class GangEnd:
    """Rank 0's end; blocks.

    Args:
        folder: of the gang.
    """

    def __init__(self, folder: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _address(folder) as address:
            self._socket.connect(address)
        self._lines = self._socket.makefile("rb")

    def report(self, event: str, data: Mapping[str, Any] | None = None) -> None:
        """Send an event; it is in the kernel's hands when this returns."""
        self._socket.sendall(_line({"event": event, **(data or {})}))

    def receive(self) -> dict[str, Any]:
        """The next command.

        Raises:
            ConnectionError: the supervisor is gone.
        """
        line = self._lines.readline()
        if not line.endswith(b"\n"):
            raise ConnectionError("the supervisor has closed the line")
        command: dict[str, Any] = json.loads(line)
        return command


def write_failure(folder: Path, rank: int, text: str) -> None:
    """Leave the error of a launch for the supervisor: the other ranks may never answer again."""
    (folder / f"failure-{rank}.json").write_text(json.dumps({"rank": rank, "error": text}), encoding="utf-8")


def failure_age_s(folder: Path) -> float:
    """Seconds since the last rank left a failure; 0 where none did."""
    now = time.time()
    return max(0.0, now - max((path.stat().st_mtime for path in folder.glob("failure-*.json")), default=now))


def read_failures(folder: Path) -> list[str]:
    """What `write_failure` left, as sentences, by rank."""
    texts = []
    for path in sorted(folder.glob("failure-*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue  # the rank died while it wrote
        texts.append(f"rank {data['rank']}: {data['error']}")
    return texts
