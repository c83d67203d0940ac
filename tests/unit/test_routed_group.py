"""How an intercepted group gets at its communicator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tunedcomm.integrations import intercept, serving
from tunedcomm.integrations.intercept import RoutedGroup


class Group:
    """Stands for a process group."""


def test_a_serving_engines_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def found(group: Any, device: Any = None) -> Any:
        asked.append(device)
        return SimpleNamespace(group=group, device=device, rank=0, world_size=2)

    monkeypatch.setattr(serving, "get_communicator", found)
    monkeypatch.setattr(intercept, "get_communicator", found)
    group: Any = Group()
    made = serving.ServingAllReduce(group, torch.device("cpu"))
    assert made._routed.communicator.device == torch.device("cpu")
    assert asked == [torch.device("cpu")] * 2


def test_forgotten_while_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(RoutedGroup):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, None if name == "_communicator" else value)

    made = object()
    monkeypatch.setattr(intercept, "get_communicator", lambda group, device=None: made)
    group: Any = Group()
    assert Forgetful(group, torch.device("cpu")).communicator is made
