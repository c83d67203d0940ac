"""Interception of PyTorch's collectives, the fusion pass for `torch.compile`, and an all-reduce for serving engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from tunedcomm import (
    kernels,  # noqa: F401 - chooses Triton's interpreter before a module here imports Inductor
    settings,
)
from tunedcomm.db.targets import warn_once
from tunedcomm.errors import UnsupportedVersionError

_OLDEST = (2, 11)
_NEWEST = (2, 14)


def check_torch(what: str, instead: str, missing: Callable[[], Iterable[str]]) -> None:
    """Refuse a torch that `what` cannot work with: operators and Inductor's hooks differ between versions.

    A torch newer than those tested gets one warning, if nothing is missing.

    Args:
        what: the caller's function, for the texts.
        instead: what to do with such a torch.
        missing: the internals of torch that `what` uses and a newer torch lacks.

    Raises:
        UnsupportedVersionError: an older version, or a newer one that lacks what is used.
    """
    version = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))
    if _OLDEST <= version <= _NEWEST:
        return
    known = f"torch {'.'.join(map(str, _OLDEST))} to {'.'.join(map(str, _NEWEST))}"
    lacking = ", ".join(missing()) if version > _NEWEST else ""
    if version < _OLDEST or lacking:
        reason = f", which lacks {lacking}" if lacking else ""
        raise UnsupportedVersionError(
            f"{what} works with {known}, this is {torch.__version__}{reason}; install one of those, or {instead}"
        )
    warn_once(f"{what} is tested with {known}, this is {torch.__version__}; all internals that it uses are there")


def after_warmup(group: dist.ProcessGroup, device: torch.device) -> None:
    """Do what TUNEDCOMM_AUTOTUNE says when a warm-up is over; collective over the group if that is anything."""
    if settings.autotune():
        from tunedcomm import warmup

        warmup.tune_or_check(group, device)
