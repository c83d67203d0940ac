"""The manifest that `tunedcomm db compile` leaves in Triton's cache directory: what the binaries there were made for.

Triton finds a binary only by the very compiler, sources and path that made it. Where one of these differs, kernels are
compiled at their first calls as if there were no cache; the manifest only lets programs say so.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunedcomm.kernels.common.launch import keep_triton_key

_NAME = "tunedcomm.json"
_AGAIN = "run `tunedcomm db compile` again"


def folder() -> Path:
    """Triton's cache directory."""
    import triton

    return Path(triton.knobs.cache.dir)


def _compiler(compute_capability: int) -> dict[str, str]:
    """Everything besides our sources that Triton's cache keys depend on."""
    from triton.backends.nvidia.compiler import get_ptxas_version
    from triton.runtime import cache

    keep_triton_key()
    return {
        "path": str(folder().resolve()),
        "Python": ".".join(map(str, sys.version_info[:2])),
        "Triton": hashlib.sha256(cache.triton_key().encode()).hexdigest(),
        "ptxas": get_ptxas_version(compute_capability),
    }


def write_manifest(compute_capability: int, sources: Mapping[str, str]) -> None:
    """Note what the binaries were made for; OSError if the directory cannot be written."""
    made = {**_read(), str(compute_capability): {**_compiler(compute_capability), "sources": dict(sources)}}
    (folder() / _NAME).write_text(json.dumps(made, indent=1, sort_keys=True), encoding="utf-8")


def _read() -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((folder() / _NAME).read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def targets() -> list[str]:
    """The GPUs that the cache has binaries for: `sm_90`, ..."""
    return [f"sm_{target}" for target in _read()]


def misfit(compute_capability: int, sources: Mapping[str, str]) -> str | None:
    """Why binaries in the cache will not be found, in a sentence; None if they will, or if there is no manifest."""
    try:
        manifest = _read()
        held = manifest.get(str(compute_capability))
        if held is None:
            have = (
                f"{folder()} has binaries of {', '.join(targets())}, none of sm_{compute_capability}; {_AGAIN} for it"
            )
            return have if manifest else None
        now = _compiler(compute_capability)
        different = [name for name, value in now.items() if held[name] != value]
        different += [name for name, source in held["sources"].items() if sources.get(name, source) != source][:1]
    except Exception as error:  # noqa: BLE001 - no cache may stop a call
        return f"{_NAME} in Triton's cache cannot be used ({type(error).__name__}: {error}); {_AGAIN}"
    if not different:
        return None
    return f"binaries in {folder()} were compiled for another {' and '.join(different)} and are not found; {_AGAIN}"
