"""tunedcomm instead of vLLM's own all-reduce: `torchrun --nproc-per-node 2 examples/vllm_all_reduce.py`.

The classes here are a few lines that do what vLLM's `CudaCommunicator` does for an all-reduce; in vLLM itself, only the
line in `main` that fills `ca_comm` is needed, in a plug-in or a worker's start-up. Runs on CPUs, too.
"""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist

import tunedcomm


class EngineCommunicator:
    """Asks its custom all-reduce first and calls the library otherwise."""

    def __init__(self, device_group: dist.ProcessGroup) -> None:
        self.device_group = device_group
        self.ca_comm: tunedcomm.ServingAllReduce | None = None
        self.num_by_library = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        custom = self.ca_comm
        if custom is not None and not custom.disabled and custom.should_custom_ar(x):
            out = custom.custom_all_reduce(x)
            assert out is not None
            return out
        self.num_by_library += 1
        out = x.clone()
        dist.all_reduce(out, group=self.device_group)
        return out


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
    communicator = EngineCommunicator(dist.group.WORLD)
    communicator.ca_comm = tunedcomm.ServingAllReduce(communicator.device_group, device)

    # On CPUs a kernel is forced, so that the example runs one although nothing is tuned.
    forced = contextlib.nullcontext() if device.type == "cuda" else tunedcomm.force("all_reduce", "lamport")
    with forced, communicator.ca_comm.capture():
        for shape, dtype in (((4, 512), torch.bfloat16), ((4, 512), torch.bfloat16), ((64,), torch.int64)):
            x = torch.full(shape, rank + 1, dtype=dtype, device=device)
            kind = tunedcomm.force("all_reduce", "library") if dtype == torch.int64 else contextlib.nullcontext()
            with kind:
                out = communicator.all_reduce(x)
            assert out.eq(world_size * (world_size + 1) // 2).all(), out
            assert x.eq(rank + 1).all()
    if rank == 0:
        for told, count in communicator.ca_comm.asked().items():
            print(f"{count} x {told}")
        print(f"{communicator.num_by_library} by the library")
    communicator.ca_comm.close()
    tunedcomm.release_communicators()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
