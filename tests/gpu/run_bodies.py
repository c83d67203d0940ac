"""Run bodies of one module in one group of ranks; starting the ranks costs ten seconds.

    torchrun --standalone --nproc-per-node 4 tests/gpu/run_bodies.py reduce_scatter_bodies variants,chain,dispatch

Prints a line of JSON a rank for each body, and one that begins with OK. The first that fails ends all, since the ranks
may be out of step then. `lost_peer`, after which they always are, goes last.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import time
import traceback

import torch
import torch.distributed as dist

from tunedcomm import kernels
from tunedcomm.hardware import gpu_of


def main(module: str, names: list[str]) -> None:
    """Run `NAME_body` for each of the names."""
    faulthandler.dump_traceback_later(float(os.environ.get("DUMP_AFTER_S", "280")))
    device = gpu_of(int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    kernels.discover()
    bodies = importlib.import_module(module)
    for name in names:
        begin = time.monotonic()
        try:
            result = getattr(bodies, f"{name}_body")()
            torch.cuda.synchronize()
        except BaseException:  # noqa: BLE001 - the other ranks would wait for this one
            sys.stderr.write(f"{module} {name} FAILED on rank {dist.get_rank()}\n{traceback.format_exc()}")
            sys.stderr.flush()
            os._exit(1)
        seconds = round(time.monotonic() - begin, 2)
        said = json.dumps({"rank": dist.get_rank(), "seconds": seconds, **result}) + "\n"
        sys.stdout.write(said + (f"OK {module} {name} {seconds} s {result}\n" if dist.get_rank() == 0 else ""))
        sys.stdout.flush()
        if name == "lost_peer":
            os._exit(0)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2].split(","))
