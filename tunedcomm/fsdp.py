"""FSDP2's gathers and reduce-scatters, served by tuned kernels: `install`, or `AllGather` and `ReduceScatter` alone.

    model = fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    served = tunedcomm.fsdp.install(model, wire=torch.bfloat16)
    ...                   # train
    print(served)         # which modules are served, and the share of calls that kernels served

A call goes to a kernel where dispatch has one that is faster, else to `torch.distributed`, as without tunedcomm.

**Gathers.** FSDP2 copies its shards into this rank's part of the output that `allocate` returned, and gathers in place.

**Reduce-scatters.** FSDP2 asks `allocate` for the input, into which it writes the gradients, then for the output. With
`wire=torch.bfloat16` and `reduce_dtype=torch.float32` the input is bf16: gradients of that dtype travel as they are, no
copy is made, and their fp32 sums, never rounded between, are the bits of an fp32 reduction in rank order. FSDP2 would
round fp32 gradients silently to a bf16 input, so `allocate` asks the frame that calls it for the gradients' dtype.

**Buffers.** Where a kernel is known to be faster on inputs that peers address, inputs lie in symmetric memory: two
buffers of each size take turns in the order of calls, which is the same on all ranks. Such kernels exchange flags
before their first read of a peer and after their last one, so a buffer is free once the call on it has ended. An event
orders the next `allocate` behind that, on whatever stream. The buffers stay until the group's communicator is released.
"""

from __future__ import annotations

import logging
import math
import re
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tunedcomm.dispatch.decide import check_limit, check_policy
from tunedcomm.dispatch.launches import no_intercept
from tunedcomm.dispatch.queue import when_due
from tunedcomm.errors import InfeasibleError, UnsupportedInputError, UnsupportedVersionError, WorkspaceError
from tunedcomm.integrations import check_torch
from tunedcomm.integrations.engines.group import by_reason, shares_of
from tunedcomm.integrations.intercept import RoutedCall, RoutedGroup, Routing, factor_of, inside, run_served, start
from tunedcomm.kernels.common.variant import all_gather_single, reduce_scatter_single
from tunedcomm.ops.adapter import TorchServe
from tunedcomm.ops.arguments import reduction_name
from tunedcomm.ops.call import leave, paths
from tunedcomm.ops.symmetric import symmetric_empty
from tunedcomm.spec import NumericsPolicy, get_variant

try:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard import _fsdp_api
except ImportError as error:
    raise UnsupportedVersionError(f"tunedcomm.fsdp needs FSDP2 of torch 2.11 or newer: {error}") from error

__all__ = ["AllGather", "Installed", "ReduceScatter", "install"]

_NUM_BUFFERS = 2  # the next module's gradients are written while this one's are reduced
logger = logging.getLogger("tunedcomm")


def _size(size: Sequence[int | torch.SymInt]) -> int:
    return math.prod(int(extent) for extent in size)


class _Comm:
    """The state of both communicators: the groups that they are called with, and what was served.

    Args:
        group: of the calls to come; a module that reshards to a smaller mesh calls with another one, too.
        numerics, max_sms: of all calls, as of `tunedcomm.reduce_scatter`. `max_sms=0` admits copy engines alone.

    Raises:
        UnsupportedInputError: `numerics` or `max_sms` is not what ops take.
        UnsupportedVersionError: a torch that this is not known to work with.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, numerics: NumericsPolicy | None = None, max_sms: int | None = None
    ) -> None:
        check_torch("tunedcomm.fsdp", "leave FSDP2's own communication", lambda: ())
        check_policy(numerics)
        check_limit("max_sms", max_sms, "SMs")
        self.group, self._numerics, self._max_sms = group, numerics, max_sms
        self._routed: dict[dist.ProcessGroup, RoutedGroup] = {}

    def calls(self) -> dict[RoutedCall, int]:
        """Kinds of calls so far, with what served them and why, to how often they were made."""
        return {call: count for of in self._routed.values() for call, count in of.counts().items()}

    def _of(self, group: dist.ProcessGroup, device: torch.device) -> RoutedGroup:
        """The group as calls are routed on it; its first call is collective set-up."""
        if group not in self._routed:
            self._routed[group] = RoutedGroup(group, device, numerics=self._numerics, max_sms=self._max_sms)
        return self._routed[group]

    def _launch(
        self, of: RoutedGroup, routing: Routing | None, run: Any, tensors: Sequence[torch.Tensor], *, is_async: bool
    ) -> dist.Work | None:
        """Make a call of an op on the current stream, or beside it."""
        if not is_async:
            inside(run)
            return None
        may_wait = routing is not None and routing.may_wait
        work: dist.Work = start(of, may_wait, run, [tensors[-1]], tensors, True)
        return work


class AllGather(_Comm, _fsdp_api.AllGather):
    """An all-gather for `FSDPModule.set_custom_all_gather`; see `_Comm` for its arguments."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the gathered shards, of which FSDP2 fills this rank's."""
        return torch.empty(_size(size), dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather `input_tensor`, which may be this rank's part of the output, on the current stream.

        Returns:
            None, or with `async_op` a work object that FSDP2 waits for.
        """
        of, path, options = self._of(group, input_tensor.device), paths["all_gather"], (0,)
        try:
            routing = of.serves("all_gather", path.adapter, input_tensor, options)
            if routing is None:
                gather = all_gather_single()
                with no_intercept():
                    work: dist.Work | None = gather(output_tensor, input_tensor, group=group, async_op=async_op)
                return work
            run = partial(run_served, of, path.adapter, TorchServe(options, input_tensor), input_tensor, output_tensor)
            return self._launch(of, routing, run, (input_tensor, output_tensor), is_async=async_op)
        except BaseException as error:
            leave(error, "all_gather", input_tensor, group)
            raise


class _Rotation:
    """Symmetric buffers for inputs of one size and dtype, in the order of calls.

    Args:
        make: makes one; collective.
    """

    def __init__(self, make: Any) -> None:
        self._buffers: list[torch.Tensor] = [make() for _ in range(_NUM_BUFFERS)]
        self._ended: list[Any] = [None] * _NUM_BUFFERS
        self._turn = 0

    def take(self) -> torch.Tensor:
        """The next buffer, in which the current stream may write from now on."""
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        if (ended := self._ended[self._turn]) is not None:
            ended.wait()
        return self._buffers[self._turn].detach()

    def holds(self, x: torch.Tensor) -> bool:
        """True if `x` is the last buffer that was taken."""
        return x.data_ptr() == self._buffers[self._turn].data_ptr()

    def end(self, x: torch.Tensor, work: dist.Work | None) -> None:
        """The call on `x` is on the current stream, or ends with `work`."""
        on_stream = work is None and x.is_cuda
        self._ended[self._turn] = torch.cuda.current_stream(x.device).record_event() if on_stream else work


class ReduceScatter(_Comm, _fsdp_api.ReduceScatter):
    """A reduce-scatter for `FSDPModule.set_custom_reduce_scatter`.

    Args:
        group, numerics, max_sms: as of `AllGather`.
        wire: `torch.bfloat16`: gradients of that dtype travel as they are where FSDP2 reduces in fp32, and are summed
            in fp32. Others, such as fp32 gradients that were accumulated without synchronisation, travel as without it,
            with a warning. None: gradients travel in the dtype in which FSDP2 reduces.

    Raises:
        UnsupportedInputError, UnsupportedVersionError: as of `AllGather`; `wire` is another dtype.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        wire: torch.dtype | None = None,
        *,
        numerics: NumericsPolicy | None = None,
        max_sms: int | None = None,
    ) -> None:
        super().__init__(group, numerics=numerics, max_sms=max_sms)
        if wire not in (None, torch.bfloat16):
            raise UnsupportedInputError(f"wire={wire} of ReduceScatter must be None or torch.bfloat16")
        self.wire = wire
        self._reduction = "avg"  # of the last call: FSDP2 asks for memory before it says what to do
        self._input: weakref.ref[torch.Tensor] | None = None  # that FSDP2 has got, but no output for it yet
        self._rotations: dict[tuple[int, torch.dtype, bool], _Rotation | None] = {}
        self._said: set[str] = set()

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the gradients of all ranks' shards, then for the sums of this rank's."""
        numel, before, self._input = _size(size), self._input, None
        if before is not None:
            x = before()
            if x is not None and x.numel() == numel * self.group.size():
                return torch.empty(numel, dtype=dtype, device=device)
            self._say("the last reduce-scatter was given up between its input and its output: beginning anew")
        wide = False
        if self.wire is not None and dtype != self.wire:
            gradients = sys._getframe(1).f_locals.get("grad_dtype")
            wide = dtype == torch.float32 and gradients == self.wire
            if not wide:
                self._say(
                    f"gradients of {gradients} are reduced in {dtype}, so they do not travel in {self.wire}; that "
                    f"takes param_dtype={self.wire}, reduce_dtype=torch.float32, and gradients synchronised every step"
                )
        made = self._allocate_input(torch.empty(numel, dtype=self.wire if wide else dtype, device=device), wide)
        self._input = weakref.ref(made)
        return made

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce and scatter `input_tensor` on the current stream, by `SUM`, `AVG` or `PREMUL_SUM`.

        Returns:
            None, or with `async_op` a work object.

        Raises:
            UnsupportedInputError: tensors of dtypes that do not belong together.
        """
        x, out, of, wide = input_tensor, output_tensor, self._of(group, input_tensor.device), False
        if x.dtype != out.dtype:
            wide = x.dtype == self.wire and out.dtype == torch.float32
            if not wide:
                raise UnsupportedInputError(f"FSDP2 reduces {x.dtype} into {out.dtype}; allocate both by this object")
        factor = factor_of(op)
        path = paths["reduce_scatter_fp32" if wide else "reduce_scatter"]
        try:
            self._reduction = "sum" if factor is not None else reduction_name(op)
            options, rotation = (self._reduction, 0), self._rotations.get((x.numel(), x.dtype, wide))
            rotation = rotation if rotation is not None and rotation.holds(x) else None
            routing = of.serves("reduce_scatter", path.adapter, x, options, symmetric=rotation is not None)
            # A product of rounded sums would be rounded twice.
            if not wide and (routing is None or (factor not in (None, 1.0) and out.dtype != torch.float32)):
                with no_intercept():
                    work: dist.Work | None = reduce_scatter_single()(out, x, op=op, group=group, async_op=async_op)
            else:

                def run() -> None:
                    path.serve_again((x, out), options, group, of.policy(path.adapter), self._max_sms)
                    if factor not in (None, 1.0):
                        when_due(lambda: out.mul_(factor))

                work = self._launch(of, routing, run, (x, out), is_async=async_op)
            if rotation is not None:
                rotation.end(x, work)
            return work
        except BaseException as error:
            leave(error, "reduce_scatter", x, group)
            raise

    def _allocate_input(self, x: torch.Tensor, wide: bool) -> torch.Tensor:
        """`x`, or the symmetric buffer whose turn it is where a kernel is known to be faster with one."""
        key = (x.numel(), x.dtype, wide)
        if key not in self._rotations:
            self._rotations[key] = self._make_rotation(x, wide)
        rotation = self._rotations[key]
        return x if rotation is None else rotation.take()

    def _make_rotation(self, x: torch.Tensor, wide: bool) -> _Rotation | None:
        of, path = self._of(self.group, x.device), paths["reduce_scatter_fp32" if wide else "reduce_scatter"]
        try:
            plan = path.planned(
                (x,), (self._reduction, 0), self.group, self._numerics, max_sms=self._max_sms, symmetric=True
            )
            if of.communicator.workspace is None or not get_variant("reduce_scatter", plan.candidate.variant).kernels:
                return None
            make = partial(symmetric_empty, x.numel(), dtype=x.dtype, device=x.device, group=self.group)
            return _Rotation(make)
        except (InfeasibleError, WorkspaceError):  # on every rank alike
            return None

    def _say(self, text: str) -> None:
        """Warn once, on rank 0."""
        if text not in self._said and dist.get_rank() == 0:
            logger.warning("tunedcomm.fsdp: %s", text)
        self._said.add(text)


@dataclass(frozen=True)
class Installed:
    """The modules of a model that `install` has served, and those that it has left alone.

    Attributes:
        served: names of modules.
        left: name of a module to the reason.
        comms: the communicators.
    """

    served: tuple[str, ...]
    left: dict[str, str]
    comms: tuple[_Comm, ...] = field(repr=False)

    def calls(self) -> dict[RoutedCall, int]:
        """Kinds of calls so far, with what served them and why, to how often they were made."""
        return {call: count for comm in self.comms for call, count in comm.calls().items()}

    def __str__(self) -> str:
        shares = shares_of(by_reason(self.calls())) or "none was made"
        text = f"{len(self.served)} modules of FSDP2; of their calls tunedcomm served: {shares}"
        return "\n".join([text, *(f"left alone: {name or 'the model'}: {why}" for name, why in self.left.items())])


_STOCK = re.compile("(Default|ProcessGroupAlloc|SymmMem)(AllGather|ReduceScatter)")


def _groups_of(module: FSDPModule) -> list[Any]:
    """The module's groups of parameters, as this torch has them."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _refusal(groups: list[Any]) -> str:
    """The reason to leave a module alone, or ""."""
    if len(groups) > 1:
        return "its parameters have several meshes, for which FSDP2 takes no custom communication"
    if getattr(groups[0].mesh_info, "shard_process_group", None) is None:
        return "it is replicated and not sharded"
    for comm in (groups[0]._all_gather_comm, groups[0]._reduce_scatter_comm):
        if not isinstance(comm, _Comm) and not _STOCK.fullmatch(type(comm).__name__):
            return f"it has custom communication, {type(comm).__name__}"
    return ""


def install(
    model: torch.nn.Module,
    *,
    wire: torch.dtype | None = None,
    numerics: NumericsPolicy | None = None,
    max_sms: int | None = None,
) -> Installed:
    """Serve the gathers and reduce-scatters of every FSDP2 module in `model`.

    All ranks call it alike, before the first step. Modules that share a process group share its communicators. Modules
    whose parameters have several meshes, replicated modules and those with other custom communication are left alone,
    and named in a warning. After `set_symm_mem_for_comm` this call wins; `set_symm_mem_for_comm` after it raises.

    Args:
        model: a module that `fully_shard` was applied to, or that contains such modules.
        wire: as of `ReduceScatter`; modules whose `param_dtype` is another travel as without it.
        numerics, max_sms: as of `AllGather`.

    Returns:
        Which modules are served; its text tells the share of calls that kernels served.

    Raises:
        UnsupportedInputError: no FSDP2 module with parameters in `model`, or an option of `AllGather` or
            `ReduceScatter`.
        UnsupportedVersionError: a torch that this is not known to work with.
    """
    served: list[str] = []
    left: dict[str, str] = {}
    gathers: dict[Any, AllGather] = {}
    scatters: dict[Any, ReduceScatter] = {}
    options: dict[str, Any] = {"numerics": numerics, "max_sms": max_sms}
    won = []
    for name, module in model.named_modules():
        groups = _groups_of(module) if isinstance(module, FSDPModule) else []
        if not groups:
            continue
        if why := _refusal(groups):
            left[name] = why
            continue
        (group,) = groups
        gather_on = group.mesh_info.shard_process_group
        scatter_on = getattr(group.mesh_info, "reduce_scatter_process_group", None) or gather_on
        if any(type(c).__name__.startswith("SymmMem") for c in (group._all_gather_comm, group._reduce_scatter_comm)):
            won.append(name or "the model")
        if gather_on not in gathers:
            gathers[gather_on] = AllGather(gather_on, **options)
        if scatter_on not in scatters:
            scatters[scatter_on] = ReduceScatter(scatter_on, wire, **options)
        module.set_custom_all_gather(gathers[gather_on])
        module.set_custom_reduce_scatter(scatters[scatter_on])
        served.append(name)
    if not served and not left:
        raise UnsupportedInputError("the model has no FSDP2 module with parameters; call fully_shard() on it first")
    if dist.get_rank() == 0:
        for name, why in left.items():
            logger.warning("tunedcomm.fsdp leaves %s alone: %s", name or "the model", why)
        if won:
            logger.warning("tunedcomm.fsdp takes the place of set_symm_mem_for_comm in %s", ", ".join(won))
    return Installed(tuple(served), left, (*gathers.values(), *scatters.values()))
