"""The manifest beside an exported file: what it is, what it holds, what made it.

No clock: the same export, the same text.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunedcomm.db.copying import Absorbed
from tunedcomm.db.schema import HEAD
from tunedcomm.db.store import Database
from tunedcomm.errors import DatabaseAccessError, DatabaseCorruptError
from tunedcomm.version import VERSION

_FORMAT = "tunedcomm-manifest"
_VERSION = 1
# No manifest is as long: what is longer is none, and is not read.
_MAX_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The description of an exported file.

    Attributes:
        file: its name, without a folder.
        sha256, num_bytes: of its bytes.
        form: `sqlite`, `jsonl` or `nccl-csv`.
        everything: it holds all rows of its sources, not only what dispatch and `explain` need.
        holds: see `holdings`.
        left_out: trials of the sources that it does not hold.
        sources: what it was made of.
        command: the command that makes it.
    """

    file: str
    sha256: str
    num_bytes: int
    form: str
    everything: bool
    holds: Mapping[str, Any]
    left_out: int
    sources: tuple[Absorbed, ...]
    command: str

    def to_json(self) -> str:
        """The text of the manifest."""
        data = {
            "format": _FORMAT,
            "version": _VERSION,
            "file": self.file,
            "sha256": self.sha256,
            "num_bytes": self.num_bytes,
            "file_format": self.form,
            "everything": self.everything,
            "schema": HEAD,
            "tunedcomm": VERSION,
            # SQLite of another version may lay the same rows out in other bytes.
            "sqlite": sqlite3.sqlite_version if self.form == "sqlite" else None,
            **self.holds,
            "left_out": self.left_out,
            "sources": [{"source": s.source, "trials": s.trials, "known": s.known} for s in self.sources],
            "command": self.command,
        }
        return json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def holdings(database: Database) -> dict[str, Any]:
    """The contents of a database, in plain values: environments, what its problems are of, and how many rows."""
    problems = database.problems()
    return {
        "environments": [{"digest": e.digest, **e.to_dict()} for e in database.environments()],
        "ops": sorted({problem.op for problem in problems}),
        "dtypes": sorted({problem.dtype for problem in problems}),
        "modes": sorted({problem.mode for problem in problems}),
        "world_sizes": sorted({problem.world_size for problem in problems}),
        "rows": database.stats(),
    }


def manifest_path(path: Path) -> Path:
    """Where the manifest of an exported file lies: beside it."""
    return path.with_name(f"{path.name}.manifest.json")


def verify_manifest(path: str | Path) -> bool:
    """Compare a file with the manifest beside it; False if there is none.

    Raises:
        DatabaseAccessError: the file or its manifest cannot be read.
        DatabaseCorruptError: the file is not the one that the manifest was written for, or that is no manifest.
    """
    path = Path(path).expanduser()
    beside = manifest_path(path)
    try:
        with beside.open("rb") as file:
            text = file.read(_MAX_BYTES)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise DatabaseAccessError(f"cannot read {beside}: {error.strerror}; check its permissions") from error
    said = _parse(beside, text)
    try:
        with path.open("rb") as file:
            sha256 = hashlib.sha256()
            num_bytes = 0
            while chunk := file.read(1 << 20):
                sha256.update(chunk)
                num_bytes += len(chunk)
    except OSError as error:
        raise DatabaseAccessError(f"cannot read {path}: {error.strerror}; check its permissions") from error
    if (said["num_bytes"], said["sha256"]) != (num_bytes, sha256.hexdigest()):
        raise DatabaseCorruptError(
            f"{path} is not what {beside.name} says: {num_bytes} bytes with SHA-256 {sha256.hexdigest()}, not "
            f"{said['num_bytes']!r:.30} bytes with {said['sha256']!r:.80}; copy both again, or remove the manifest if "
            "the file was changed on purpose"
        )
    return True


def _parse(beside: Path, text: bytes) -> Mapping[str, Any]:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        said = None
    known = isinstance(said, dict) and said.get("format") == _FORMAT and said.get("version") == _VERSION
    if not known or not {"sha256", "num_bytes"} <= set(said):
        raise DatabaseCorruptError(
            f"{beside} is no manifest that this tunedcomm knows: {text[:60]!r}; copy it again, or remove it"
        )
    found: Mapping[str, Any] = said
    return found
