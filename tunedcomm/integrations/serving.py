"""`tunedcomm.ServingAllReduce` is an all-reduce for the communicators of serving engines.

The communicators of vLLM and SGLang ask several objects in turn whether they want a tensor; the first that does reduces
it. Each slot has its own method names, and this object has all of them:

| engine's slot | asks | calls |
|---|---|---|
| `ca_comm`, the engine's own kernels | `should_custom_ar(x)` | `custom_all_reduce(x)` |
| vLLM's `symm_mem_comm` | `should_use_symm_mem(x)` | `all_reduce(x, out=None)` |
| SGLang's `torch_symm_mem_comm` | `should_torch_symm_mem_allreduce(x)` | `all_reduce(x, out=None)` |

To use it, put one into the slot after the engine has made its groups, on every rank:

    communicator.ca_comm = tunedcomm.ServingAllReduce(communicator.device_group)

`examples/vllm_all_reduce.py` and `examples/sglang_all_reduce.py` do so with engines of a few lines.

`dcp_a2a_lse_reduce` stands in for vLLM's function of that name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from tunedcomm.dispatch.communicator import drop_at_exit
from tunedcomm.dispatch.decide import check_limit, check_policy
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.errors import UnsupportedInputError
from tunedcomm.fp8 import WIRES, Wire
from tunedcomm.integrations import after_warmup
from tunedcomm.integrations.intercept import RoutedCall, RoutedGroup
from tunedcomm.ops.arguments import check_tensor
from tunedcomm.ops.attention import dcp_combine
from tunedcomm.ops.call import paths
from tunedcomm.ops.collectives import all_reduce
from tunedcomm.spec import NumericsPolicy

_CALL = "ServingAllReduce.all_reduce"


class ServingAllReduce:
    """All-reduces (sum, out of place) of one group for a serving engine.

    Making one is collective over the group, and it is made outside of graph capture.

    Args:
        group: the group whose backend works on the engine's device: vLLM's and SGLang's `device_group`, not the
            `cpu_group` that their own kernels are given. None: the default group.
        device: where the engine's tensors are; by default the current CUDA device, or the CPU where there is none.
        max_bytes: larger tensors are left to the engine; None: no limit besides what was tuned.
        wire: how its sums travel where a kernel is tuned for that, as of `all_reduce`; None: as TUNEDCOMM_WIRE says.
        numerics: the policy of its sums, as of `all_reduce`. With `ordered` it takes every tensor, so `max_bytes` must
            be None, and raises InfeasibleError for what no ordered variant can sum.

    Attributes:
        disabled: True after `close()`; engines look at it before they ask.
        rank, world_size: the caller's place in the group.

    Raises:
        NotInitializedError: no default process group.
        GroupError: not a member of the group, or it has no backend for the device.
        UnsupportedInputError: `max_bytes` is not a number of bytes, or given with `ordered`; no such policy.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        *,
        max_bytes: int | None = None,
        wire: Wire | None = None,
        numerics: NumericsPolicy | None = None,
    ) -> None:
        check_limit("max_bytes", max_bytes, "bytes")
        if wire not in (None, *WIRES):
            raise UnsupportedInputError(f"wire={wire!r} is unknown; allowed: {', '.join(WIRES)}, or None")
        check_policy(numerics)
        communicator = get_communicator(group, None if device is None else torch.device(device))
        if max_bytes is not None and communicator.policy(numerics) == "ordered":
            raise UnsupportedInputError("max_bytes leaves tensors to the engine, which numerics='ordered' forbids")
        drop_at_exit(self, "group")
        self.group, self.device = communicator.group, communicator.device
        self.rank, self.world_size = communicator.rank, communicator.world_size
        self.max_bytes = max_bytes
        self.disabled = False
        self.numerics, self.wire = numerics, wire
        self._routed = RoutedGroup(self.group, self.device, numerics=numerics)

    def should_use(self, x: torch.Tensor) -> bool:
        """True if a kernel is expected to be faster than the library here; the same on every rank.

        It rests on number of elements and dtype of `x`, and on whether a graph is captured, which ranks have in common,
        and not on how `x` lies in memory: copies see to that. In a capture only problems that were asked for before it
        are served; engines run each size once before they capture it.
        """
        check_tensor("ServingAllReduce", x)
        if self.disabled or (self.max_bytes is not None and x.nbytes > self.max_bytes):
            return False
        if self._routed.on_wire(_CALL, x, self.wire) is not None:
            return True
        return self._routed.serves(_CALL, paths["all_reduce"].adapter, x, ("sum",)) is not None

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The sum over all ranks, in `out` or in a new tensor; `x` is left as it is unless `out` is `x`.

        Served whether `should_use(x)` or not: by the library then.

        Raises:
            UnsupportedInputError: a dtype or an `out` that cannot be served.
            PeerTimeoutError: an earlier call on the group timed out waiting for a peer.
        """
        check_tensor("ServingAllReduce", x)
        x = x.detach()
        plain, wire = self._routed.plain(x), None
        if on := self._routed.on_wire(_CALL, x, self.wire, count=False):  # `should_use` counts
            wire = on[0]
        if plain is x or out is None or out.data_ptr() != x.data_ptr():
            return all_reduce(plain, group=self.group, out=out, wire=wire, numerics=self.numerics)
        return out.copy_(all_reduce(plain, group=self.group, out=plain, wire=wire, numerics=self.numerics))

    def custom_all_reduce(self, x: torch.Tensor) -> torch.Tensor | None:
        """`all_reduce` into a new tensor, or None where `should_use(x)` is False."""
        return self.all_reduce(x) if self.should_use(x) else None

    should_custom_ar = should_use
    should_use_symm_mem = should_use
    should_torch_symm_mem_allreduce = should_use

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Engines enter this around the captures of their graphs. Peers need no registration of its tensors.

        On leaving it the group is tuned if TUNEDCOMM_AUTOTUNE says so; on every rank then.
        """
        yield
        after_warmup(self.group, self.device)

    def close(self) -> None:
        """Refuse from here on; the group's communicator lives on for other callers."""
        self.disabled = True
        self._routed.forget()

    def asked(self) -> dict[RoutedCall, int]:
        """Kinds of tensors that were asked about, with what would serve them and why, to how often."""
        return self._routed.counts()


def dcp_a2a_lse_reduce(
    cp_attn_out: torch.Tensor,
    cp_attn_lse: torch.Tensor,
    cp_group: Any,
    ctx: Any = None,
    return_lse: bool = False,
    is_lse_base_on_e: bool = True,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`dcp_combine` with the arguments of vLLM's function of that name (`vllm/v1/attention/ops/dcp_alltoall.py`).

    Args:
        cp_attn_out: this rank's partial outputs, [B, H, D].
        cp_attn_lse: their LSEs, [B, H], of any floating-point dtype.
        cp_group: an object whose `device_group` is the process group, as vLLM's GroupCoordinator.
        ctx: ignored, as by vLLM's.
        return_lse: return the LSE, too.
        is_lse_base_on_e: the LSEs are natural logarithms, else of base 2.

    Returns:
        [B, H/n, D], or a pair of it and its LSE [B, H/n] in fp32.

    Raises:
        UnsupportedInputError, PeerTimeoutError: as `dcp_combine`.
    """
    base, group = "e" if is_lse_base_on_e else "2", cp_group.device_group
    return dcp_combine(cp_attn_out, cp_attn_lse.float(), base=base, return_lse=return_lse, group=group)  # type: ignore[arg-type]
