from __future__ import annotations

from . import comm, fused

__all__ = ["comm", "fused"]
