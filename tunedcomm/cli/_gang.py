"""How many ranks a command starts on this machine."""

from __future__ import annotations

import typer

from tunedcomm.hardware import num_gpu_ranks, ranks_share_a_gpu

__all__ = ["host_ranks", "local_ranks", "num_gpus", "swept_ranks"]


def num_gpus() -> int:
    """CUDA GPUs that ranks can use here; a single one that they may share counts as many."""
    import torch

    return num_gpu_ranks() if torch.cuda.is_available() else 0


def local_ranks(world_size: int | None) -> int:
    """Ranks to start: those asked for, else one a GPU, else 2 on the host backend or on a single GPU that they share.

    Raises:
        BadParameter: more ranks than GPUs, on a machine that has several, or more than the host backend serves.
    """
    available = num_gpus()
    if available < 2 or ranks_share_a_gpu():
        return host_ranks(world_size)
    if world_size is None:
        return available
    if available < world_size:
        raise typer.BadParameter(
            f"{world_size} ranks need {world_size} GPUs, this machine has {available}; "
            'hide them with CUDA_VISIBLE_DEVICES="" to use the host backend',
            param_hint="--world-size",
        )
    return world_size


def host_ranks(world_size: int | None) -> int:
    """Ranks of the host backend, or on a GPU that they share, to start: 2 by default.

    Raises:
        BadParameter: more than kernels serve, which would be a measurement of the library alone.
    """
    from tunedcomm.symm.layout import MAX_WORLD_SIZE

    if world_size is not None and world_size > MAX_WORLD_SIZE:
        raise typer.BadParameter(
            f"{world_size} ranks are more than the {MAX_WORLD_SIZE} that kernels serve on one host; pass a smaller "
            "--world-size",
            param_hint="--world-size",
        )
    return world_size or 2


def swept_ranks(world_size: int | None, backend: str | None) -> int:
    """Ranks of a sweep on `cuda`, `host`, or whichever of them this machine has.

    Raises:
        BadParameter: this machine cannot start that many.
    """
    if backend == "host":
        return host_ranks(world_size)
    if backend == "cuda" and num_gpus() < 2:
        raise typer.BadParameter(
            f"it needs at least 2 GPUs, this machine has {num_gpus()}; leave it out or pass --backend host to tune "
            "CPU ranks, whose timings say nothing about GPUs",
            param_hint="--backend",
        )
    return local_ranks(world_size)
