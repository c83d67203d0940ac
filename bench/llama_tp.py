"""Layers of Llama 3 70B on 4 GPUs: PyTorch's tensor parallelism as it is, and with tunedcomm in and under it.

    torchrun --nproc-per-node 4 bench/llama_tp.py --csv bench/results/model/llama_tp_h200.csv --check
    torchrun --nproc-per-node 2 bench/llama_tp.py --tiny        # the same code on CPUs, with toy sizes

The model has random weights and the real shapes, and PyTorch's own plans (`bench/llama_model.py`). Workloads: `prefill`
of a sequence and `train`, a forward and a backward of it, with sequence parallelism; `decode_N`, a token of each of N
sequences with key and value caches, with plain tensor parallelism. Forward steps are replayed CUDA graphs, where that
can be; `train` is called. Configurations (`--only`): `library_eager`, `library_compiled` and `async_tp_compiled` are
PyTorch's own; `intercept_eager`, `intercept_compiled` and `fusion_compiled` are tunedcomm's. All have the same weights
and are measured in turns. What cannot run here is a row with the reason.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

WORKLOADS = ("prefill", "decode", "decode_1", "decode_8", "decode_64", "train")
NAMES = (
    "library_eager",
    "library_compiled",
    "async_tp_compiled",
    "intercept_eager",
    "intercept_compiled",
    "fusion_compiled",
)


def names_of(allowed: tuple[str, ...], text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in allowed]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(allowed)}")
    return names


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="toy sizes in fp32 on CPUs, kernels interpreted")
    parser.add_argument("--layers", type=int, help="decoder layers (4; tiny: 1)")
    parser.add_argument("--tokens", type=int, default=4096, help="of prefill and train")
    parser.add_argument("--context", type=int, default=1024, help="of decode, the new token included")
    parser.add_argument("--only", type=lambda text: names_of(NAMES, text), help="configurations, separated by commas")
    parser.add_argument("--workload", type=lambda text: names_of(WORKLOADS, text), help="workloads, likewise")
    parser.add_argument("--rounds", type=int, help="turns of each configuration")
    parser.add_argument("--backend", help="of torch.compile (inductor; tiny: aot_eager)")
    parser.add_argument("--fuse", choices=("pays", "always"), help="the fusion pass's `when` (pays; tiny: always)")
    parser.add_argument("--limit-s", type=float, default=210, help="no configuration is begun after so many seconds")
    parser.add_argument("--stall-s", type=float, default=150, help="a stage may take so long before the run is ended")
    parser.add_argument("--tracebacks", action="store_true", help="print those of what fails")
    parser.add_argument("--csv", type=Path, help="rows are appended to it")
    parser.add_argument("--plot", type=Path, help="write a PNG")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    arguments = parser.parse_args()
    arguments.layers = arguments.layers or (1 if arguments.tiny else 4)
    return arguments


def set_environment(*, tiny: bool) -> None:
    """Before torch is imported, for that is when some of these are read."""
    # Nothing may make multicast objects: NCCL and torch's symmetric memory would by themselves.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    if tiny:
        os.environ.setdefault("TRITON_INTERPRET", "1")
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> int:
    arguments = parsed()
    set_environment(tiny=arguments.tiny)
    import torch
    import torch.distributed as dist
    from llama_report import draw, verdicts
    from llama_run import Runner
    from torch.distributed.device_mesh import init_device_mesh

    import tunedcomm

    device = torch.device("cpu")
    if not arguments.tiny:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if arguments.tiny else "nccl", device_id=None if arguments.tiny else device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    environment = tunedcomm.get_communicator(mesh.get_group()).environment
    runner = Runner(arguments, mesh, device, environment)
    rows = runner.run()
    code = 0
    if dist.get_rank() == 0:
        if arguments.plot:
            try:
                draw(rows, arguments.plot)
            except (ImportError, ValueError) as error:
                print(f"no plot: {error}", file=sys.stderr)
        if arguments.check:
            found = verdicts(rows, list(dict.fromkeys(row["workload"] for row in rows)))
            print(*found, sep="\n", flush=True)
            code = int(not all(verdict.passed for verdict in found))
    with runner.ranks.watched("the end"):
        tunedcomm.release_communicators()
        dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
