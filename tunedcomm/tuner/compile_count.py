"""How often this process had to compile a kernel because Triton's cache did not hold it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["CompileCount"]


class CompileCount:
    """Listens to Triton's compilations from now on, besides whoever listened before.

    Attributes:
        num_compiled: kernels that the cache did not hold; those that fail to compile are not told of.
    """

    def __init__(self) -> None:
        from triton import knobs

        self.num_compiled = 0
        self._before: Callable[..., None] | None = knobs.compilation.listener
        knobs.compilation.listener = self._hear

    def _hear(self, *, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        self.num_compiled += not cache_hit
        if self._before is not None:
            self._before(src=src, metadata=metadata, metadata_group=metadata_group, times=times, cache_hit=cache_hit)
