from __future__ import annotations

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


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TUNEDCOMM_DB", raising=False)
    assert settings.borrow() == ()
    assert settings.check() == (0, False)
    assert settings.debug() is False
    assert settings.db_url() is None
    assert settings.db_network() == "auto"
    assert settings.db_path() == ()
    assert settings.db_patience_s() == 600.0
    assert settings.forced("all_reduce") is None
    assert settings.log_level() == "warning"
    assert settings.mode() == "cached"
    assert settings.peer_timeout_s() == 60.0
    assert settings.workspace_bytes() == 64 << 20


def test_values_are_read_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEDCOMM_DB", " /data/tuned.db ")
    monkeypatch.setenv("TUNEDCOMM_DB_PATIENCE_S", "0")
    monkeypatch.setenv("TUNEDCOMM_DB_NETWORK", "No")
    monkeypatch.setenv("TUNEDCOMM_BORROW", " H100 ,, NVIDIA H100* ")
    monkeypatch.setenv("TUNEDCOMM_FORCE_ALL_REDUCE", "lamport")
    monkeypatch.setenv("TUNEDCOMM_LOG", "DEBUG")
    monkeypatch.setenv("TUNEDCOMM_MODE", "off")
    monkeypatch.setenv("TUNEDCOMM_PEER_TIMEOUT_S", "0.5")
    monkeypatch.setenv("TUNEDCOMM_WORKSPACE_MIB", "128")
    assert settings.db_url() == "/data/tuned.db"
    assert settings.db_patience_s() == 0.0
    assert settings.db_network() == "no"
    assert settings.borrow() == ("H100", "NVIDIA H100*")
    assert settings.forced("all_reduce") == "lamport"
    assert settings.forced("all_gather") is None
    assert settings.log_level() == "debug"
    assert settings.mode() == "off"
    monkeypatch.setenv("TUNEDCOMM_NAN_CHECK", "Yes")
    monkeypatch.setenv("TUNEDCOMM_NODE_OF_RANK", "0, 0,1 ,1")
    monkeypatch.setenv("TUNEDCOMM_CHECK", "100")
    assert settings.check() == (100, False)
    monkeypatch.setenv("TUNEDCOMM_CHECK", " 8, Fallback")
    assert settings.check() == (8, True)
    monkeypatch.setenv("TUNEDCOMM_DEBUG", "on")
    assert settings.debug() is True
    assert settings.nan_check() is True
    assert settings.node_of_rank() == (0, 0, 1, 1)
    assert settings.peer_timeout_s() == 0.5
    assert settings.workspace_bytes() == 128 << 20


@pytest.mark.parametrize(
    ("text", "expected"), [("0", False), ("Off", False), ("1", True), ("yes", True), ("/m.jsonl", "/m.jsonl")]
)
def test_the_log_of_misses_is_a_file_or_a_switch(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: str | bool
) -> None:
    monkeypatch.setenv("TUNEDCOMM_MISS_LOG", text)
    assert settings.miss_log() == expected


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("TUNEDCOMM_DB_NETWORK", "nfs", settings.db_network),
        ("TUNEDCOMM_DB_PATIENCE_S", "ages", settings.db_patience_s),
        ("TUNEDCOMM_CHECK", "often", settings.check),
        ("TUNEDCOMM_CHECK", "3,library", settings.check),
        ("TUNEDCOMM_DEBUG", "2", settings.debug),
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
    assert settings.unknown_variables(("all_reduce",)) == ["TUNEDCOMM_FORCE_ALLREDUCE", "TUNEDCOMM_TIMEOUT"]
