"""Adapters for other projects: files named by `--peers`, loaded on every rank; see tunedcomm/peers.py."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
import typer

from tunedcomm.peers import LeftOut, Peer
from tunedcomm.spec import Problem

__all__ = ["Adapter", "adapter_files", "load_adapter"]

Makes: TypeAlias = Callable[[Problem, torch.device], Iterable[Peer]]


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A contender's name, and what makes its settings for a problem."""

    name: str
    peers: Makes


def adapter_files(targets: Sequence[str]) -> list[Path]:
    """The files that `--peers` means: each target one, or all of a directory but those that begin with `_`.

    Raises:
        BadParameter: a target is not there or holds none, or two have one name.
    """
    found: list[Path] = []
    for target in targets:
        path = Path(target)
        files = sorted(path.glob("[!_]*.py")) if path.is_dir() else [path]
        if not files or not all(file.is_file() and file.suffix == ".py" for file in files):
            raise typer.BadParameter(
                f"{target!r} is no Python file and no directory of some; bench/peers of the repository is one",
                param_hint="--peers",
            )
        found += [file.absolute() for file in files]
    names = [file.stem for file in found]
    for name in names:
        if names.count(name) > 1:
            raise typer.BadParameter(f"two adapters are named {name}; contenders go by name", param_hint="--peers")
    return found


def _refusing(why: str) -> Makes:
    def peers(problem: Problem, device: torch.device) -> Iterable[Peer]:
        raise LeftOut(why)

    return peers


def load_adapter(path: Path) -> Adapter:
    """The adapter in a file; one that cannot be loaded refuses every problem and says why."""
    spec = importlib.util.spec_from_file_location(f"tunedcomm_peer_{path.stem}", path)
    assert spec is not None, "a file that ends in .py has a loader"
    assert spec.loader is not None, "see above"
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        peers = module.peers
    except Exception as error:  # noqa: BLE001 - somebody else's file; what it raises is the reason
        return Adapter(path.stem, _refusing(f"{path} cannot be loaded: {type(error).__name__}: {error}"))
    return Adapter(path.stem, peers)
