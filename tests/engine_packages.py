"""Python files of vLLM and SGLang, importable without what they need to run a model.

`make engines` fetches them. Packages that only the rest of an engine needs are replaced by stubs: modules any attribute
of which is a class that can be called, derived from and used as a decorator.
"""

from __future__ import annotations

import ast
import importlib.machinery
import os
import re
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("ENGINES", "/tmp/tunedcomm-engines"))

_STUBS = {
    "vllm": (
        "psutil zmq urllib3 cloudpickle requests pydantic msgspec pynvml vllm.config vllm._aiter_ops vllm._custom_ops "
        "vllm._C vllm._C_stable_libtorch vllm.model_executor vllm.transformers_utils vllm.triton_utils "
        "vllm.utils.deep_gemm"
    ).split(),
    "sglang": (
        "psutil zmq pydantic pydantic_core sgl_kernel tvm_ffi requests orjson pybase64 IPython uvloop fastapi "
        "sglang.srt.server_args transformers pynvml setproctitle prometheus_client einops "
        "starlette aiohttp torchao decord PIL huggingface_hub msgspec torchvision "
        "sglang.kernels.jit sglang.srt.layers.dp_attention sglang.srt.distributed.device_communicators.pcie_ipc_ar "
        "sglang.srt.distributed.device_communicators.custom_all_reduce"
    ).split(),
}


def versions(engine: str) -> list[str]:
    """Versions of the engine whose files are there, oldest first."""
    found = [path.name.partition("-")[2] for path in FOLDER.glob(f"{engine}-*") if path.is_dir()]
    return sorted(found, key=lambda text: [int(part) for part in text.split(".")])


def source(engine: str, version: str, name: str) -> ast.Module:
    """One of its files, read."""
    return ast.parse((FOLDER / f"{engine}-{version}" / engine / name).read_text(encoding="utf-8"))


def arguments(tree: ast.Module, function: str) -> set[str]:
    """The names of a function's arguments."""
    (found,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == function)
    return {argument.arg for argument in found.args.args}


class _Meta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return anything(name)

    def __or__(cls, other: object) -> Any:
        return Any

    __ror__ = __or__

    def __getitem__(cls, key: object) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


class Anything(metaclass=_Meta):
    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else Anything()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def anything(name: str) -> type:
    return _Meta(name, (Anything,), {})


class _Stub(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "get_current_vllm_config_or_none":
            return lambda: None
        return anything(name)


class _Finder:
    """Finds the stubs; where a package is installed, it too is replaced."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = set(names)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        parts = name.split(".")
        if any(".".join(parts[: n + 1]) in self.names for n in range(len(parts))):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install(engine: str, version: str) -> None:
    """Let `import vllm` or `import sglang` find those files, in this process from here on."""
    sys.modules.setdefault("regex", re)  # for the few patterns that these modules compile
    package = types.ModuleType(engine)
    package.__path__ = [str(FOLDER / f"{engine}-{version}" / engine)]
    package.__version__ = version  # type: ignore[attr-defined]
    package.__spec__ = importlib.machinery.ModuleSpec(engine, None, is_package=True)
    sys.modules[engine] = package
    sys.meta_path.insert(0, _Finder(_STUBS[engine]))  # type: ignore[arg-type]


def fetch(requirement: str) -> None:
    """Download a wheel, `vllm==0.33.0`, and keep its Python files and metadata."""
    folder = FOLDER / requirement.replace("==", "-")
    if folder.exists():
        return
    with tempfile.TemporaryDirectory() as temporary:
        options = ("--quiet", "--no-deps", "--only-binary=:all:", "--dest", temporary)
        subprocess.run([sys.executable, "-m", "pip", "download", *options, requirement], check=True)
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as packed:
            kept = [name for name in packed.namelist() if name.endswith(".py") or ".dist-info/" in name]
            packed.extractall(folder, kept)


if __name__ == "__main__":
    fetch(sys.argv[1])
