"""The manifest beside an exported file: its digest, its contents, the command that made it.

No clock: the same export, the same text.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from pathlib import Path
from typing import Any

from tunedcomm.db.schema import HEAD
from tunedcomm.db.store import Database
from tunedcomm.errors import DatabaseAccessError, DatabaseCorruptError
from tunedcomm.version import VERSION

_IDENTITY = {"format": "tunedcomm-manifest", "version": 1}
# No manifest is as long: what is longer is none, and is not read.
_MAX_BYTES = 16 << 20


def make_manifest(file: Path, database: Database, /, **facts: Any) -> dict[str, Any]:
    """The manifest of an exported file, in plain JSON values.

    Args:
        file: the file; its name may change.
        database: the rows that it was made of.
        facts: what the exporter alone knows.
    """
    problems = database.problems()
    return {
        **_IDENTITY,
        **_content(file),
        "schema": HEAD,
        "tunedcomm": VERSION,
        # SQLite of another version may lay the same rows out in other bytes.
        "sqlite": sqlite3.sqlite_version if facts["file_format"] == "sqlite" else None,
        "environments": [{"digest": e.digest, **e.to_dict()} for e in database.environments()],
        "ops": sorted({problem.op for problem in problems}),
        "dtypes": sorted({problem.dtype for problem in problems}),
        "modes": sorted({problem.mode for problem in problems}),
        "world_sizes": sorted({problem.world_size for problem in problems}),
        "rows": database.stats(),
        **facts,
    }


def manifest_path(path: Path) -> Path:
    """The path of an exported file's manifest: beside it."""
    return path.with_name(f"{path.name}.manifest.json")


def verify_manifest(path: str | Path) -> bool:
    """Compare a file with the manifest beside it; False if there is none.

    Raises:
        DatabaseAccessError: the file or its manifest cannot be read.
        DatabaseCorruptError: the file is not the one that the manifest was written for, or that is not a manifest.
    """
    path = Path(path).expanduser()
    beside, stored = manifest_path(path), None
    if not os.path.lexists(beside):
        return False
    try:
        with beside.open("rb") as manifest:
            text = manifest.read(_MAX_BYTES)
        content = _content(path)
        stored = json.loads(text)
    except OSError as error:
        raise DatabaseAccessError(f"cannot read {error.filename}: {error.strerror}; check its permissions") from error
    except (ValueError, RecursionError):
        pass
    if not (isinstance(stored, dict) and _IDENTITY.items() <= stored.items() and content.keys() <= stored.keys()):
        raise DatabaseCorruptError(
            f"{beside} is not a manifest that this tunedcomm knows: {text[:60]!r}; copy it again, or remove it"
        )
    if content != {name: stored[name] for name in content}:
        raise DatabaseCorruptError(
            f"{path} is not what {beside.name} says: {content['num_bytes']} bytes with SHA-256 {content['sha256']}, "
            f"not {stored['num_bytes']!r:.30} bytes with {stored['sha256']!r:.80}; copy both again, or remove the "
            "manifest if the file was changed on purpose"
        )
    return True


def _content(path: Path) -> dict[str, Any]:
    """Digest and size of a file."""
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            sha256.update(chunk)
        return {"sha256": sha256.hexdigest(), "num_bytes": file.tell()}
