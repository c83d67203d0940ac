"""FlashInfer (github.com/flashinfer-ai/flashinfer) as a contender.

Its port of TensorRT-LLM's all_reduce, its all_reduce with fp8 on the wire, Ulysses, and for bench/experts.py its
exchange of experts. Needs the package flashinfer-python. Only the backend `trtllm` is used, which makes its workspace
without multicast; `mnnvl` and `auto` may make multicast objects. Results go to given tensors, inputs are ordinary ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tunedcomm.peers import LeftOut, Peer, Tensors, default_group, need_rendezvous
from tunedcomm.spec import ITEMSIZE, Problem

NAME = "FlashInfer"  # in bench/experts.py
IDS = torch.int32
LARGEST_HIDDEN = 8192
PACKET_BYTES = 16
LARGEST_BYTES = 64 << 20  # its workspace is several times as large
LARGEST_ONE_SHOT_BYTES = 8 << 20
WORLD_SIZES = (2, 4, 8)

ULYSSES_HEAD_DIM = 128

# (elements of a rank, dtype) to a communicator, likewise.
_communicators: dict[tuple[int, str], Any] = {}
# (tokens, hidden, dtype) to a workspace: they are made by all ranks together, and kept.
_workspaces: dict[tuple[int, int, str], Any] = {}


def _workspace(comm: Any, problem: Problem, tokens: int, hidden: int) -> Any:
    key = (tokens, hidden, problem.dtype)
    if key not in _workspaces:
        group = default_group()
        _workspaces[key] = comm.create_allreduce_fusion_workspace(
            backend="trtllm",
            world_size=problem.world_size,
            rank=group.rank(),
            max_token_num=tokens,
            hidden_dim=hidden,
            dtype=getattr(torch, problem.dtype),
        )
    return _workspaces[key]


def rows_of(problem: Problem) -> tuple[int, int]:
    """Tokens and hidden size of a message; of a flat one, rows as long as it can be cut into.

    Raises:
        LeftOut: no row is whole packets.
    """
    hidden = problem.shape[-1]
    if len(problem.shape) == 1:
        hidden = min(LARGEST_HIDDEN, problem.numel & -problem.numel)
    if hidden == 0 or hidden * ITEMSIZE[problem.dtype] % PACKET_BYTES:
        raise LeftOut(f"rows of {hidden} elements are not a multiple of {PACKET_BYTES} bytes")
    return problem.numel // hidden, hidden


def _settings(problem: Problem, tokens: int) -> Iterator[tuple[str, bool, bool]]:
    """(text, one-shot, early launch)."""
    if problem.nbytes <= LARGEST_ONE_SHOT_BYTES:
        yield "trtllm one-shot, early launch", True, True
        yield "trtllm one-shot", True, False
    if tokens > problem.world_size:
        yield "trtllm two-shot, early launch", False, True


def _all_reduce(comm: Any, problem: Problem, device: torch.device) -> Iterator[Peer]:
    tokens, hidden = rows_of(problem)
    workspace = _workspace(comm, problem, tokens, hidden)
    out = torch.empty((tokens, hidden), dtype=getattr(torch, problem.dtype), device=device)
    for text, one_shot, early in _settings(problem, tokens):

        def run(inputs: Tensors, one_shot: bool = one_shot, early: bool = early) -> Tensors:
            comm.allreduce_fusion(
                input=inputs[0].view(tokens, hidden),
                workspace=workspace,
                pattern=comm.AllReduceFusionPattern.kAllReduce,
                launch_with_pdl=early,
                output=out,
                use_oneshot=one_shot,
                fp32_acc=True,
            )
            return (out,)

        yield Peer(text, lambda: (torch.empty(problem.shape, dtype=out.dtype, device=device),), run)


def _norm(comm: Any, problem: Problem, device: torch.device) -> Iterator[Peer]:
    if problem.layout != "residual" or problem.scaling:
        raise LeftOut("it adds a residual before the norm and nothing else: layout residual")
    from tunedcomm.kernels.all_reduce_rms_norm.op import EPS

    tokens, hidden = rows_of(problem)
    workspace = _workspace(comm, problem, tokens, hidden)
    dtype = getattr(torch, problem.dtype)
    y, h = (torch.empty(problem.shape, dtype=dtype, device=device) for _ in range(2))

    def allocate() -> Tensors:
        return torch.empty_like(y), torch.empty((hidden,), dtype=dtype, device=device), torch.empty_like(y)

    for text, one_shot, early in _settings(problem, tokens):

        def run(inputs: Tensors, one_shot: bool = one_shot, early: bool = early) -> Tensors:
            x, weight, residual = inputs
            comm.allreduce_fusion(
                input=x,
                workspace=workspace,
                pattern=comm.AllReduceFusionPattern.kARResidualRMSNorm,
                launch_with_pdl=early,
                residual_in=residual,
                residual_out=h,
                norm_out=y,
                rms_gamma=weight,
                rms_eps=EPS,
                use_oneshot=one_shot,
                fp32_acc=True,
            )
            return y, h

        yield Peer(text, allocate, run)


def _ulysses(comm: Any, problem: Problem, device: torch.device) -> Iterator[Peer]:
    """Its exchange by kernels over NVLink. One communicator serves problems of one size and dtype, and is kept."""
    tokens, batch, width = problem.shape
    n, head_dim = problem.world_size, ULYSSES_HEAD_DIM
    if width % (n * head_dim) or tokens % n:
        raise LeftOut(f"{width} elements are no heads of {head_dim} for each of {n} ranks")
    dtype, scatters = getattr(torch, problem.dtype), problem.op == "ulysses_scatter"
    numel = problem.numel // n
    if (numel, problem.dtype) not in _communicators:
        _communicators[numel, problem.dtype] = comm.UlyssesCommunicator(
            group=default_group(), max_elems=numel, dtype=dtype, device=device, backend="nvlink"
        )
    communicator = _communicators[numel, problem.dtype]
    by_tokens, by_heads = (batch, tokens // n, width // head_dim), (batch, tokens, width // n // head_dim)
    shape, result = (by_tokens, by_heads) if scatters else (by_heads, by_tokens)
    move = communicator.scatter_heads if scatters else communicator.gather_heads

    def run(inputs: Tensors) -> Tensors:
        found = move(inputs[0].view(*shape, head_dim))
        return (found.view(*result[:2], result[2] * head_dim),)

    flat = (*shape[:2], shape[2] * head_dim)
    yield Peer("nvlink", lambda: (torch.empty(flat, dtype=dtype, device=device),), run)


def _quantized(comm: Any, problem: Problem, device: torch.device) -> Iterator[Peer]:
    """Its two-shot with fp8 and a scale of 128 elements on the wire. Its symmetric memory is PyTorch's."""
    if problem.scaling != "fp8_group128" or problem.dtype != "bfloat16" or problem.numel % 8:
        raise LeftOut("it quantises multiples of 8 bfloat16 elements, to fp8")
    need_rendezvous(device)
    out = torch.empty(problem.shape, dtype=torch.bfloat16, device=device)

    def run(inputs: Tensors) -> Tensors:
        comm.quantized_all_reduce(inputs[0], default_group(), scale_group=128, output=out)
        return (out,)

    yield Peer("fp8 two-shot", lambda: (torch.empty_like(out),), run)


def experts_pair(problem: Problem, device: torch.device) -> Callable[[Tensors], torch.Tensor]:
    """Its dispatch and combine of one ep_dispatch problem: tokens, ids and weights there, a row a rank back.

    A dispatch without its combine can hang, so they are one call. Experts would write their rows where the combine
    reads them, in its workspace; nothing writes there. It sends an id of -1 to rank 0: compare without such ids.

    Args:
        problem: ep_dispatch in the layout `tokens`.
        device: this rank's GPU.

    Returns:
        The call, given x, ids (int32) and weights (float32).
    """
    from flashinfer.comm.comm_backend import TorchDistBackend
    from flashinfer.comm.mapping import Mapping
    from flashinfer.comm.mnnvl import MnnvlConfig
    from flashinfer.comm.trtllm_moe_alltoall import MoeAlltoAll

    tokens, hidden, topk, experts = problem.shape
    n, rank = problem.world_size, default_group().rank()
    mapping = Mapping(n, rank, n, tp_size=n, moe_ep_size=n)
    config = MnnvlConfig(comm_backend=TorchDistBackend(default_group()))
    exchange = MoeAlltoAll(mapping, tokens, topk, experts, hidden_size=hidden, mnnvl_config=config)

    def run(inputs: Tensors) -> torch.Tensor:
        exchange.dispatch(inputs[1], list(inputs), tokens)
        rows = exchange.get_combine_payload_tensor_in_workspace(tokens, hidden, inputs[0].dtype)
        total: torch.Tensor = exchange.combine(rows, tokens, payload_in_workspace=True)
        return total

    return run


_OPS = {"all_reduce": _all_reduce, "all_reduce_rms_norm": _norm}
_MOVES = ("ulysses_scatter", "ulysses_gather")


def peers(problem: Problem, device: torch.device) -> Iterator[Peer]:
    """Its forms of the problem's op."""
    from flashinfer import comm

    if problem.op in _MOVES:
        if not hasattr(comm, "UlyssesCommunicator"):
            raise LeftOut("this FlashInfer is older than UlyssesCommunicator")
        if problem.dtype not in ("bfloat16", "float16", "float32"):
            raise LeftOut(f"it is run for floating point numbers, not {problem.dtype}")
        yield from _ulysses(comm, problem, device)
        return
    if problem.op not in _OPS:
        raise LeftOut(f"no adapter for FlashInfer's {problem.op}")
    if problem.op == "all_reduce" and problem.scaling:
        yield from _quantized(comm, problem, device)
        return
    if not hasattr(comm, "create_allreduce_fusion_workspace"):
        raise LeftOut("this FlashInfer is older than create_allreduce_fusion_workspace")
    if problem.reduction != "sum" or problem.world_size not in WORLD_SIZES:
        raise LeftOut(f"it sums over 2, 4 or 8 ranks; this is {problem.reduction} over {problem.world_size}")
    if problem.dtype not in ("bfloat16", "float16", "float32") or problem.nbytes > LARGEST_BYTES:
        raise LeftOut(f"it is run for floating point numbers up to {LARGEST_BYTES >> 20} MiB")
    yield from _OPS[problem.op](comm, problem, device)
