"""Files in the user's cache directory: what one start works out and the next one reads.

A leaf. Each file holds one JSON value under one key. A file that is missing, damaged or of another key counts as none;
where nothing can be written, every start works the value out.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import platformdirs

from tunedcomm.hardware import version_of

_PACKAGE = Path(__file__).resolve().parent


def state_of(paths: Iterable[Path]) -> str:
    """SHA-256 over place, size and time of change of files, and the versions of Python, Triton and torch."""
    found = [sys.version, *map(version_of, ("triton", "torch"))]
    for path in sorted(paths):
        there = path.stat()
        found.append(f"{path} {there.st_size} {there.st_mtime_ns}")
    return hashlib.sha256("\n".join(found).encode()).hexdigest()


@functools.cache
def package_state() -> str:
    """The state of this package's files."""
    return state_of(_PACKAGE.rglob("*.py"))


def read(name: str, key: str) -> Any:
    """The value that was kept as `name` under this very key, or None."""
    with contextlib.suppress(OSError, RuntimeError, ValueError, LookupError, TypeError):
        held = json.loads(_file(name).read_text(encoding="utf-8"))
        if held["key"] == key:
            return held["value"]
    return None


def keep(name: str, key: str, value: object) -> None:
    """Replace what is kept as `name`, in one step: other processes read the old file or the new one."""
    with contextlib.suppress(OSError, RuntimeError):
        path = _file(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        file, written = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)  # the user's alone, as databases are
        try:
            with os.fdopen(file, "w", encoding="utf-8") as stream:
                json.dump({"key": key, "value": value}, stream)
            Path(written).replace(path)
        finally:
            Path(written).unlink(missing_ok=True)


def _file(name: str) -> Path:
    """A file for each place where the package is; RuntimeError if the user has no home directory."""
    place = hashlib.sha256(str(_PACKAGE).encode()).hexdigest()[:8]
    return Path(platformdirs.user_cache_dir("tunedcomm", appauthor=False)).expanduser() / f"{name}-{place}.json"
