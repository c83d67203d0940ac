"""Resources of gangs on this machine: a backend's settings, as many ranks and gangs as fit, and their GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tunedcomm import hardware
from tunedcomm.errors import TuningError
from tunedcomm.hardware import Environment, ranks_share_a_gpu
from tunedcomm.metrics import plural
from tunedcomm.tuner.gang.protocol import Backend, Settings

_DETECT = "import json; from tunedcomm.hardware import detect; print(json.dumps(detect(0).to_dict()))"


def backend_settings(backend: Backend, world_size: int, *, gangs: int = 1) -> Settings:
    """A sweep's usual settings on a backend.

    An interpreted launch takes about 0.1 s: the host gets few trials, few samples of slow launches, and long time-outs.
    """
    if backend == "cuda":
        return Settings(backend=backend, world_size=world_size, gangs=gangs, trials=160, patience=48)
    return Settings(
        backend=backend,
        world_size=world_size,
        gangs=gangs,
        trials=8,
        first_rounds=2,
        more_rounds=8,
        final_rounds=8,
        round_budget_us=200_000.0,
        trial_timeout_s=60.0,
        peer_timeout_s=20.0,
    )


def machine_settings(backend: Backend, world_size: int, gangs: int | None = None) -> Settings:
    """A sweep's usual settings on this machine.

    Args:
        backend, world_size: of a gang.
        gangs: gangs that run at once; by default as many as the GPUs hold, one on the host.

    Raises:
        TuningError: fewer than one gang, or the machine has too few GPUs.
    """
    wanted = 1 if gangs is None else gangs
    if wanted < 1:
        raise TuningError(f"a sweep needs at least 1 gang, got {gangs}")
    if backend == "host":  # CPU ranks share cores, so any number of gangs can run
        return backend_settings(backend, world_size, gangs=wanted)
    gpus = hardware.num_gpu_ranks()
    fitting = min(gpus // world_size, 1) if ranks_share_a_gpu() else gpus // world_size
    if wanted > fitting:
        raise TuningError(
            f"{plural(wanted, 'gang')} of {world_size} ranks need {wanted * world_size} GPUs and this machine has "
            f"{gpus} usable ones: at most {fitting} fit; pass fewer --gangs or ranks, or --backend host for CPU ranks"
        )
    return backend_settings(backend, world_size, gangs=gangs or fitting)


def gang_devices(settings: Settings) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each gang: its own share of the GPUs that this process may use."""
    if settings.backend == "host" or settings.stand_in:
        return [""] * settings.gangs
    if ranks_share_a_gpu():
        return [os.environ.get("CUDA_VISIBLE_DEVICES") or "0"]
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    names = visible or [str(index) for index in range(settings.gangs * settings.world_size)]
    starts = range(0, settings.gangs * settings.world_size, settings.world_size)
    return [",".join(names[start : start + settings.world_size]) for start in starts]


def environment_of(backend: Backend) -> Environment:
    """This machine's environment, of its first GPU or of the host; leaves no GPU context in this process.

    Raises:
        TuningError: the first GPU cannot be examined.
    """
    if backend == "host":
        return hardware.detect(None)
    done = subprocess.run([sys.executable, "-c", _DETECT], capture_output=True, text=True, check=False)
    try:
        return Environment.from_dict(json.loads(done.stdout))
    except ValueError:
        last = done.stderr.strip().rpartition("\n")[2]
        raise TuningError(f"the first GPU cannot be examined: {last}; run `tunedcomm doctor`") from None
