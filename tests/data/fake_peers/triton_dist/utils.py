from __future__ import annotations

import os

import torch.distributed as dist

_world: list[dist.ProcessGroup] = []


def is_shmem_initialized() -> bool:
    return bool(_world)


def init_nvshmem_by_torch_process_group(pg: dist.ProcessGroup) -> None:
    assert not _world, "it is initialised once"
    assert os.environ["NVSHMEM_DISABLE_NVLS"] == "1", "or it may make multicast objects"
    _world.append(pg)
