"""The entry point by which vLLM and SGLang load tunedcomm: their collectives are served with no line of code.

Engines load their plug-ins in every process, also for `--help` and to look at a model, and vLLM calls them without
`try`. So `register` imports nothing, reads no device and raises nothing. It leaves hooks at a few functions of the
engine; the first process group that the engine makes imports the rest, `tunedcomm.integrations.engines`.
"""

from __future__ import annotations

import logging
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType
    from typing import Any

# Versions whose packages the tests check, in words.
TESTED = {"vllm": "0.28 to 0.33", "sglang": "0.5.18 to 0.5.23"}
VLLM_STOCK = "vllm.distributed.device_communicators.cuda_communicator.CudaCommunicator"
# Methods of SGLang's GroupCoordinator to the functions of tunedcomm.integrations.engines.sglang around them.
SGLANG_HOOKS = {
    "__init__": "init",
    "destroy": "destroy",
    "_all_reduce_out_place": "all_reduce_out_place",
    "_flashinfer_allreduce": "all_reduce_out_place",
    "_all_reduce_in_place": "all_reduce_in_place",
    "_all_gather_into_tensor": "all_gather",
    "_reduce_scatter_tensor": "reduce_scatter",
    "all_gatherv": "all_gatherv",
    "reduce_scatterv": "reduce_scatterv",
}
_warned: set[str] = set()
_OFF = ("0", "off", "no", "false")


def register() -> None:
    """Hook into the engine that calls this; once in a process, whatever the number of calls.

    `TUNEDCOMM_ENGINES=0` leaves every engine alone.
    """
    try:
        if os.environ.get("TUNEDCOMM_ENGINES", "").strip().lower() in _OFF:
            return
        if "vllm" in sys.modules:
            _after_import("vllm.platforms.cuda", _hook_vllm)
        if "sglang" in sys.modules:
            _after_import("sglang.srt.distributed.parallel_state", _hook_sglang)
            _after_import("sglang.srt.layers.flashinfer_comm_fusion", _hook_sglang_norm)
    except Exception as error:  # noqa: BLE001 - what it raises would end the engine
        _warn("vllm" if "vllm" in sys.modules else "sglang", f"{type(error).__name__}: {error}")


def _warn(engine: str, why: str) -> None:
    """Say once, in the engine's log, that the engine goes on without tunedcomm."""
    import multiprocessing

    if engine in _warned:
        return
    _warned.add(engine)
    # Workers have a parent where the engine starts them, and a rank where a launcher does.
    if multiprocessing.parent_process() is None and os.environ.get("RANK", "0") == "0":
        logging.getLogger(f"{engine}.tunedcomm").warning(
            "tunedcomm leaves this %s alone: %s; it is tested with %s %s", engine, why, engine, TESTED[engine]
        )


class _AfterImport:
    """A finder at the front of `sys.meta_path` that calls `then(module)` once the module `name` has been imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name, self._then = name, then

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name != self.name:
            return None
        others: list[Any] = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                self._then(module)

            spec.loader.exec_module = exec_module
        return spec


def _after_import(name: str, hook: Callable[[ModuleType], None]) -> None:
    """Call `hook` with the module `name` now, or when it has been imported; errors of `hook` are warnings."""

    def then(module: ModuleType) -> None:
        try:
            hook(module)
        except Exception as error:  # noqa: BLE001 - the import is the engine's own
            _warn(name.partition(".")[0], f"{name} is not as expected ({type(error).__name__}: {error})")

    if name in sys.modules:
        then(sys.modules[name])
    elif not any(getattr(finder, "name", None) == name and type(finder) is _AfterImport for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(name, then))


def _hook_vllm(module: ModuleType) -> None:
    """Let vLLM's CUDA platform name a communicator that asks tunedcomm first."""
    base = module.CudaPlatformBase
    stock = base.__dict__["get_device_communicator_cls"]
    if hasattr(stock.__func__, "stock"):
        return

    def get_device_communicator_cls(cls: type) -> str:
        name: str = stock.__get__(None, cls)()
        try:
            if name == VLLM_STOCK and not _is_elastic():
                from tunedcomm.integrations.engines import vllm

                return vllm.communicator_class(name)
        except Exception as error:  # noqa: BLE001 - the engine's own class serves
            _warn("vllm", f"{type(error).__name__}: {error}")
        return name

    get_device_communicator_cls.stock = stock  # type: ignore[attr-defined]
    base.get_device_communicator_cls = classmethod(get_device_communicator_cls)


def _is_elastic() -> bool:
    """True under elastic expert parallelism, whose coordinator asserts that the class is vLLM's own."""
    config = sys.modules.get("vllm.config")
    found = getattr(config, "get_current_vllm_config_or_none", lambda: None)()
    return bool(getattr(getattr(found, "parallel_config", None), "enable_elastic_ep", False))


def _hook_sglang(module: ModuleType) -> None:
    missing = [name for name in SGLANG_HOOKS if not hasattr(module.GroupCoordinator, name)]
    if missing:
        raise AttributeError(f"GroupCoordinator has no {', '.join(missing)}")
    _around(module, {f"GroupCoordinator.{method}": name for method, name in SGLANG_HOOKS.items()})


def _hook_sglang_norm(module: ModuleType) -> None:
    """Serve the fused norm, too, where the module says over which group it sums."""
    if hasattr(module, "resolve_fusion_group"):
        _around(module, {"flashinfer_allreduce_residual_rmsnorm": "norm"})


def _around(module: ModuleType, hooks: dict[str, str]) -> None:
    """Register hooks of SGLang's own kind, and put them in place."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not hasattr(module, "tunedcomm_hooks"):
        module.tunedcomm_hooks = hooks  # type: ignore[attr-defined]
        for target, name in hooks.items():
            HookRegistry.register(f"{module.__name__}.{target}", _call(name), HookType.AROUND)
        HookRegistry.apply_hooks()


def _call(name: str) -> Callable[..., Any]:
    def hook(*args: Any, **kwargs: Any) -> Any:
        from tunedcomm.integrations.engines import sglang

        return getattr(sglang, name)(*args, **kwargs)

    return hook
