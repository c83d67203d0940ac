"""The functions that are written for repeated calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tunedcomm.kernels.common.launch import AddressLaunch
from tunedcomm.ops import fast_call
from tunedcomm.ops.adapter import CallSignature
from tunedcomm.ops.call import paths
from tunedcomm.ops.fast_call import ServedCall


def test_the_docstring_shows_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function for `all_reduce(x)`, launched by addresses as on GPUs, is in the module's docstring as it is."""
    monkeypatch.setattr(fast_call, "_device_type", "cuda")
    communicator: Any = SimpleNamespace(
        device_index=0, device=torch.device("cpu"), status_view=[0], last_streams=[0, 0], any_symmetric=False
    )
    plan: Any = SimpleNamespace(launch=AddressLaunch(print), wants_aligned=True)
    x = torch.ones(64)
    asked = CallSignature(("sum",), (True, False), (-1,), None, None, False, "default")
    served = ServedCall(communicator, paths["all_reduce"].adapter, plan, (x, None), (x.clone(),), asked)
    written = fast_call.write_fast_call(served)
    assert written is not None
    function = written[0].partition("\n    def call")[2].rpartition("    return call")[0]
    shown = (fast_call.__doc__ or "").partition("    def call")[2]
    assert function
    assert shown.strip() == function.strip()


@pytest.mark.parametrize("name", [name for name, path in paths.items() if path.adapter.depends_on_memory])
def test_the_first_input_is_looked_at_where_peers_may_address_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = paths[name].adapter
    looked: list[torch.Tensor] = []
    communicator: Any = SimpleNamespace(
        device_index=0, device=torch.device("cpu"), status_view=[0], last_streams=[0, 0], any_symmetric=True,
        is_symmetric=lambda tensor: bool(looked.append(tensor)),
    )  # fmt: skip
    problem = SimpleNamespace(input_kind="plain")
    plan: Any = SimpleNamespace(launch=lambda *_: None, wants_aligned=False, problem=problem)
    inputs = tuple(torch.ones(64) for _ in adapter.inputs)
    outputs = tuple(torch.ones(64) for _ in adapter.outputs)
    options = tuple(0 for _ in adapter.options)
    asked = CallSignature(options, (True,) * 2, (-1,) * len(outputs), None, None, False, "default")
    call = fast_call.make_fast_call(ServedCall(communicator, adapter, plan, (*inputs, *outputs), outputs, asked))
    assert call is not None
    assert call(*inputs, *outputs, *options, None, None) is not None
    assert looked[0] is inputs[0]
