"""Interception of PyTorch's collectives, the fusion pass for `torch.compile`, and an all-reduce for serving engines."""

from __future__ import annotations

import torch
import torch.distributed as dist

import tunedcomm.kernels  # noqa: F401 - chooses Triton's interpreter before a module here imports Inductor
from tunedcomm import settings
from tunedcomm.errors import UnsupportedVersionError

_OLDEST = (2, 11)
_NEWEST = (2, 13)


def check_torch(what: str, instead: str) -> None:
    """Refuse a torch that `what` was not written for: operators and Inductor's hooks differ between versions.

    Args:
        what: the caller's function, for the error's text.
        instead: what to do with such a torch.

    Raises:
        UnsupportedVersionError: an older or newer version.
    """
    major, minor = torch.__version__.split("+")[0].split(".")[:2]
    if not _OLDEST <= (int(major), int(minor)) <= _NEWEST:
        known = f"torch {'.'.join(map(str, _OLDEST))} to {'.'.join(map(str, _NEWEST))}"
        raise UnsupportedVersionError(
            f"{what} is known to work with {known}, this is {torch.__version__}; install one of those, or {instead}"
        )


def after_warmup(group: dist.ProcessGroup, device: torch.device) -> None:
    """Do what TUNEDCOMM_AUTOTUNE says when a warm-up is over; collective over the group if that is anything."""
    if settings.autotune():
        from tunedcomm import warmup

        warmup.after_warmup(group, device)
