"""Blocks in which the program's state does not count, and `reusable`, which makes blocks that may be entered again.

The former are for what outlives a call, and for what judges a candidate: programs set a default dtype or device while
they load a model, call in inference mode, or lower the precision of fp32 products. A tensor that is made meanwhile and
kept would carry that into every later call.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Generic, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

P = ParamSpec("P")
T = TypeVar("T")


class Reusable(contextlib.ContextDecorator, contextlib.AbstractContextManager[T], Generic[T]):
    """A `with` block that may be entered again: each entry makes a new one by `make`."""

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[T]]) -> None:
        self._make, self._entered = make, list[contextlib.AbstractContextManager[T]]()

    def __enter__(self) -> T:
        made = self._make()
        value = made.__enter__()
        self._entered.append(made)
        return value

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, traceback)


def reusable(function: Callable[P, Iterator[T]]) -> Callable[P, Reusable[T]]:
    """`contextlib.contextmanager`, whose objects serve for one `with` only, for blocks that may be entered again."""
    once = contextlib.contextmanager(function)

    @functools.wraps(function)
    def make(*args: P.args, **options: P.kwargs) -> Reusable[T]:
        return Reusable(functools.partial(once, *args, **options))

    return make


@contextlib.contextmanager
def clean_thread() -> Iterator[None]:
    """A block without this thread's modes: inference, gradients, default device, and whatever else intercepts PyTorch.

    Whatever is kept is made in such a block: a tensor that was made in inference mode cannot be written outside of it,
    and a tensor of `FakeTensorMode` has no memory.
    """
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode(mode=False), torch.no_grad():
        yield


@contextlib.contextmanager
def clean_process() -> Iterator[None]:
    """`clean_thread`, with PyTorch's own default dtype, and products as exact as the tolerances expect.

    The default dtype and the precision of products belong to the whole process, so this is for tuning and benchmarks
    alone, not for calls.
    """
    products = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        stack.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
        stack.callback(setattr, products[0], "allow_fp16_accumulation", products[0].allow_fp16_accumulation)
        for product in products:
            stack.callback(setattr, product, "fp32_precision", product.fp32_precision)
        with contextlib.suppress(RuntimeError):  # PyTorch refuses to tell where a program has set the line above
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_default_dtype(torch.float32)
        torch.set_deterministic_debug_mode("default")
        torch.set_float32_matmul_precision("highest")
        products[0].allow_fp16_accumulation = False
        for device_type in ("cpu", "cuda"):
            stack.callback(torch.set_autocast_enabled, device_type, torch.is_autocast_enabled(device_type))
            torch.set_autocast_enabled(device_type, False)
        stack.enter_context(clean_thread())
        yield
