from __future__ import annotations

from typing import Any

import pytest

from tunedcomm import settings
from tunedcomm.errors import SettingError


def test_table_is_sorted_and_complete() -> None:
    names = [setting.name for setting in settings.SETTINGS]
    assert names == sorted(names)
    assert len(names) == len(set(names))
    for setting in settings.SETTINGS:
        assert setting.name.startswith(settings.PREFIX)
        assert setting.default_text
        assert setting.allowed
        assert setting.meaning.endswith(".")


@pytest.mark.parametrize(
    ("name", "default", "text", "value"),
    [
        ("borrow", ("siblings",), " H100 ,, NVIDIA H100* ", ("siblings", "H100", "NVIDIA H100*")),
        ("borrow", ("siblings",), "No", ()),
        ("check", (0, False), "100", (100, False)),
        ("check", (0, False), " 8, Fallback", (8, True)),
        ("db_network", "auto", "No", "no"),
        ("db_path", (), None, None),
        ("db_patience_s", 600.0, "0", 0.0),
        ("debug", False, "1", True),
        ("engines", True, "0", False),
        ("log_level", None, "DEBUG", "debug"),
        ("miss_log", None, "0", False),
        ("miss_log", None, "Off", False),
        ("miss_log", None, "1", True),
        ("miss_log", None, "yes", True),
        ("miss_log", None, "/m.jsonl", "/m.jsonl"),
        ("mode", "cached", "off", "off"),
        ("nan_check", False, " 1 ", True),
        ("node_of_rank", None, "0, 0,1 ,1", (0, 0, 1, 1)),
        ("peer_timeout_s", None, "0.5", 0.5),
        ("workspace_bytes", 64 << 20, "128", 128 << 20),
    ],
)
def test_values_are_read_at_the_call(
    monkeypatch: pytest.MonkeyPatch, name: str, default: Any, text: str | None, value: Any
) -> None:
    read = getattr(settings, name)
    assert default is None or read() == default
    if text is not None:
        variable = {"log_level": "LOG", "workspace_bytes": "WORKSPACE_MIB"}.get(name, name.upper())
        monkeypatch.setenv(f"TUNEDCOMM_{variable}", text)
        assert read() == value


def test_the_database_and_what_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TUNEDCOMM_DB", raising=False)
    assert (settings.db_url(), settings.forced("all_reduce")) == (None, None)
    monkeypatch.setenv("TUNEDCOMM_DB", " /data/tuned.db ")
    monkeypatch.setenv("TUNEDCOMM_FORCE_ALL_REDUCE", "lamport")
    assert settings.db_url() == "/data/tuned.db"
    assert (settings.forced("all_reduce"), settings.forced("all_gather")) == ("lamport", None)


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("TUNEDCOMM_DB_NETWORK", "nfs", settings.db_network),
        ("TUNEDCOMM_DB_PATIENCE_S", "ages", settings.db_patience_s),
        ("TUNEDCOMM_CHECK", "often", settings.check),
        ("TUNEDCOMM_CHECK", "3,library", settings.check),
        ("TUNEDCOMM_DEBUG", "2", settings.debug),
        ("TUNEDCOMM_DEBUG", "yes", settings.debug),
        ("TUNEDCOMM_MODE", "fast", settings.mode),
        ("TUNEDCOMM_NAN_CHECK", "maybe", settings.nan_check),
        ("TUNEDCOMM_NODE_OF_RANK", "0,,1", settings.node_of_rank),
        ("TUNEDCOMM_LOG", "loud", settings.log_level),
        ("TUNEDCOMM_PEER_TIMEOUT_S", "0", settings.peer_timeout_s),
        ("TUNEDCOMM_PEER_TIMEOUT_S", "1000000001", settings.peer_timeout_s),
        ("TUNEDCOMM_PEER_TIMEOUT_S", "nan", settings.peer_timeout_s),
        ("TUNEDCOMM_WORKSPACE_MIB", "0", settings.workspace_bytes),
        ("TUNEDCOMM_WORKSPACE_MIB", "65537", settings.workspace_bytes),
    ],
)
def test_bad_value_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, read: object) -> None:
    monkeypatch.setenv(name, value)
    assert callable(read)
    with pytest.raises(SettingError) as caught:
        read()
    setting = next(setting for setting in settings.SETTINGS if setting.name == name)
    for part in (name, repr(value), setting.allowed):
        assert part in str(caught.value)


def test_misspelt_variables_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEDCOMM_TIMEOUT", "3")
    monkeypatch.setenv("TUNEDCOMM_FORCE_ALL_REDUCE", "lamport")
    monkeypatch.setenv("TUNEDCOMM_FORCE_ALLREDUCE", "lamport")
    monkeypatch.setenv("TUNEDCOMM_XYZ", "1")
    assert settings.unknown_variables(("all_reduce", "all_reduce_bias")) == {
        "TUNEDCOMM_FORCE_ALLREDUCE": "TUNEDCOMM_FORCE_ALL_REDUCE",
        "TUNEDCOMM_TIMEOUT": "TUNEDCOMM_PEER_TIMEOUT_S",
        "TUNEDCOMM_XYZ": "",
    }
