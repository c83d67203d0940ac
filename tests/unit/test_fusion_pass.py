"""What `fusion_pass` refuses where there are no ranks, and what importing tunedcomm does not bring."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch

import tunedcomm


def test_no_process_group() -> None:
    with pytest.raises(tunedcomm.NotInitializedError, match="init_process_group"):
        tunedcomm.fusion_pass()


@pytest.mark.parametrize("version", ["2.10.1", "2.14.0+cu130"])
def test_other_versions_of_torch(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(tunedcomm.UnsupportedVersionError, match=r"fusion_pass\(\) is known to work with torch 2.11 to"):
        tunedcomm.fusion_pass()


def test_the_settings_of_inductor_can_be_copied_with_it() -> None:
    from tunedcomm.integrations.fusion import FusionPass

    class Group:
        def __reduce__(self) -> str:
            raise TypeError("cannot pickle a process group")

    group: Any = Group()
    fusion = FusionPass((group,), "pays", "default", None, None)
    assert copy.deepcopy({"post_grad_custom_post_pass": fusion})["post_grad_custom_post_pass"] is fusion


def test_a_build_of_torch_without_the_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    from tunedcomm.integrations import fusion

    monkeypatch.setattr(fusion, "config", object())
    with pytest.raises(tunedcomm.UnsupportedVersionError, match=r"call tunedcomm\.ag_gemm and its like directly"):
        tunedcomm.fusion_pass()


@pytest.mark.slow
def test_inductor_is_not_imported_for_other_names() -> None:
    code = "import sys, tunedcomm; tunedcomm.gemm_rs; print('tunedcomm.integrations.fusion' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
