"""SGLang: hooks around the methods of its `GroupCoordinator` by which every collective runs, and its fused norm.

The methods are bodies of SGLang's operators, so compiled code comes through them as eager code does. `ca_comm` and the
other back ends stay as they are. Each hook gets the original and its arguments by position or name, as they come, and
asks the group's `EngineGroup` first.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tunedcomm.dispatch.launches import no_intercept
from tunedcomm.integrations.engines.group import EngineGroup, serve_one, serve_operator

NORM = "flashinfer_allreduce_residual_rmsnorm"


def is_deterministic() -> bool:
    """True with SGLANG_ENABLE_DETERMINISTIC_INFERENCE, which `--enable-deterministic-inference` sets."""
    envs = importlib.import_module("sglang.srt.environ").envs
    return bool(envs.SGLANG_ENABLE_DETERMINISTIC_INFERENCE.get())


def init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Around the making of a group."""
    original(self, *args, **kwargs)
    self.tuned = None
    try:
        serve_operator(f"sglang::{NORM}", fused_norm)
        if self.device_group in dist.distributed_c10d._world.pg_map:
            self.tuned = EngineGroup("sglang", self.device_group, self.device, ordered=is_deterministic())
    except Exception as error:  # noqa: BLE001 - the engine goes on without
        logging.getLogger("sglang.tunedcomm").warning("tunedcomm leaves a group of SGLang alone: %s", error)


def _given(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> list[Any]:
    """A call's arguments of these names, which are its first ones; None for those that are not there."""
    given = dict(zip(names, args, strict=False)) | kwargs
    return [given.get(name) for name in names]


def all_reduce_out_place(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `_all_reduce_out_place` and `_flashinfer_allreduce`; the first may go on to `_all_reduce_in_place`."""
    (x,) = _given(args, kwargs, "input_")
    found = serve_one(self, "all_reduce", "all_reduce", x, ("sum",))
    if found is not None:
        return found
    with no_intercept():
        return original(self, *args, **kwargs)


def all_reduce_in_place(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `_all_reduce_in_place`."""
    (x,) = _given(args, kwargs, "input_")
    return None if serve_one(self, "all_reduce", "all_reduce", x, ("sum",), x) is x else original(self, *args, **kwargs)


def all_gather(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `_all_gather_into_tensor`."""
    output, x = _given(args, kwargs, "output", "input")
    served = serve_one(self, "all_gather", "all_gather", x, (0,), output) is not None
    return None if served else original(self, *args, **kwargs)


def reduce_scatter(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `_reduce_scatter_tensor`."""
    output, x = _given(args, kwargs, "output", "input")
    found = serve_one(self, "reduce_scatter", "reduce_scatter", x, ("sum", 0), output)
    return original(self, *args, **kwargs) if found is None else found


def all_gatherv(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `all_gatherv`, which returns a list for one tensor, too."""
    given, sizes, output = _given(args, kwargs, "input_", "sizes", "output")
    xs = [given] if isinstance(given, torch.Tensor) else given
    tuned: EngineGroup | None = getattr(self, "tuned", None)
    found = None
    if tuned is not None and (output is None or len(xs) == 1):
        found = tuned.serve_rows("all_gatherv", "all_gather_v", xs, sizes, output)
    return original(self, *args, **kwargs) if found is None else found


def reduce_scatterv(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `reduce_scatterv`; in the deterministic mode that makes an all-reduce, which is asked in its turn."""
    x, output, sizes = _given(args, kwargs, "input_", "output", "sizes")
    tuned: EngineGroup | None = getattr(self, "tuned", None)
    found = None if tuned is None else tuned.serve_rows("reduce_scatterv", "reduce_scatter_v", [x], sizes, output)
    return original(self, *args, **kwargs) if found is None else found[0]


def destroy(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Around the end of a group."""
    if getattr(self, "tuned", None) is not None:
        self.tuned.close()
        self.tuned = None
    original(self, *args, **kwargs)


def fused_norm(
    *,
    input_tensor: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    use_attn_tp_group: bool = True,
    **others: Any,
) -> tuple[torch.Tensor, ...] | None:
    """SGLang's operator: (norm, new residual), or None where SGLang's own kernel is to run."""
    find = importlib.import_module("sglang.srt.layers.flashinfer_comm_fusion").resolve_fusion_group
    tuned: EngineGroup | None = getattr(find(use_attn_tp_group=use_attn_tp_group)[2], "tuned", None)
    return None if tuned is None else tuned.serve_norm(input_tensor, weight, residual, eps)


def norm(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around the function of that operator, which eager code calls past the operator; compiled code comes there."""
    if torch.compiler.is_compiling():
        return original(*args, **kwargs)
    names = ("input_tensor", "residual", "weight", "eps")
    found = fused_norm(**dict(zip(names, args, strict=False)), **kwargs)
    if found is not None:
        return found
    with no_intercept():
        return original(*args, **kwargs)
