"""tunedcomm in SGLang's group coordinator: `torchrun --nproc-per-node 2 examples/sglang_all_reduce.py`.

The class here does in a few lines what SGLang's `GroupCoordinator` does for an all-reduce: it asks several objects in
turn, which have different method names. Runs on CPUs, too.
"""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist

import tunedcomm


class Coordinator:
    """Holds an object in its symmetric memory slot, and calls the library if that object refuses a tensor."""

    def __init__(self, device_group: dist.ProcessGroup) -> None:
        self.device_group = device_group
        self.torch_symm_mem_comm: tunedcomm.ServingAllReduce | None = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        symmetric = self.torch_symm_mem_comm
        if symmetric is not None and not symmetric.disabled and symmetric.should_torch_symm_mem_allreduce(x):
            return symmetric.all_reduce(x)
        dist.all_reduce(x, group=self.device_group)  # the engine's last resort works in place
        return x


def main() -> None:
    """One rank."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = (
        torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    assert dist.group.WORLD is not None
    coordinator = Coordinator(dist.group.WORLD)
    # Larger tensors than this stay with the engine.
    coordinator.torch_symm_mem_comm = tunedcomm.ServingAllReduce(coordinator.device_group, device, max_bytes=1 << 14)

    forced = contextlib.nullcontext() if device.type == "cuda" else tunedcomm.force("all_reduce", "lamport")
    with forced:
        for numel in (1024, 1 << 14):
            x = torch.full((numel,), rank + 1.0, device=device)
            out = coordinator.all_reduce(x)
            assert out.eq(world_size * (world_size + 1) // 2).all(), out
            if rank == 0:
                print(f"{numel} elements: {'the library' if out is x else 'tunedcomm'}")
    tunedcomm.release_communicators()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
