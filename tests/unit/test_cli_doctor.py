from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tunedcomm.cli import doctor, main
from tunedcomm.cli.output import Line
from tunedcomm.db import engine
from tunedcomm.kernels import plugins


def by_name(checks: list[Line], name: str) -> Line:
    return next(check for check in checks if check.name == name)


def test_every_line_is_complete() -> None:
    checks = doctor.run_checks()
    assert {"python", "torch", "triton", "gpus", "host backend", "shared memory", "user database"} <= {
        check.name for check in checks
    }
    for check in checks:
        assert check.detail
        assert check.level in ("ok", "warn", "fail")
        assert check.fix or check.level == "ok", f"{check.name} does not say what to do"


def test_network_file_system_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engine, "file_system", lambda path, mounts: "nfs4")
    check = by_name([c for c in doctor.check_databases() if c.level == "warn"], "user database")
    assert "nfs4" in check.detail
    assert str(tmp_path / "user.db") in check.detail
    assert "TUNEDCOMM_DB_PATH" in check.detail
    assert "PostgreSQL" in check.detail
    assert "TUNEDCOMM_DB" in check.fix
    monkeypatch.setenv("TUNEDCOMM_DB_NETWORK", "no")
    assert all(c.level == "ok" for c in doctor.check_databases())


def test_missing_user_database_is_no_fault() -> None:
    check = by_name(list(doctor.check_databases()), "user database")
    assert check.level == "ok"
    assert "tunedcomm tune" in check.detail


def test_damaged_database_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "damaged.db"
    path.write_bytes(b"no database at all " * 100)
    monkeypatch.setenv("TUNEDCOMM_DB", str(path))
    check = by_name(list(doctor.check_databases()), "user database")
    assert check.level == "fail"
    assert str(path) in check.detail


def test_a_site_database_that_is_not_there_is_to_be_made_or_named_right(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TUNEDCOMM_DB_PATH", str(tmp_path / "gone.db"))
    check = by_name(list(doctor.check_databases()), "site database")
    assert check.level == "fail"
    assert "make it or correct TUNEDCOMM_DB_PATH" in check.fix
    (tmp_path / "gone.db").write_text("not a database, but there")
    check = by_name(list(doctor.check_databases()), "site database")
    assert "repair, upgrade or remove it" in check.fix


def test_packages_with_variants_are_named(monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(plugins, "brought", {"nice": ["all_reduce.gather_sum", "all_reduce.swap"]})
    monkeypatch.setattr(plugins, "failed", {"broken": "its entry point x = y failed: ImportError: z"})
    (good, bad) = doctor.check_packages()
    assert (good.level, good.detail) == ("ok", "nice brings all_reduce.gather_sum, all_reduce.swap")
    assert good.name == bad.name == "variants"
    assert (bad.level, "broken brings no variants" in bad.detail) == ("warn", True)
    monkeypatch.setattr(plugins, "brought", {})
    monkeypatch.setattr(plugins, "failed", {})
    (none,) = doctor.check_packages()
    assert none.level == "ok"


def test_a_package_that_brings_nothing_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(plugins, "brought", {"empty": [], "broken": []})
    monkeypatch.setattr(plugins, "failed", {"broken": "its entry point x = y failed: ImportError: z"})
    (empty, broken) = doctor.check_packages()
    assert (empty.level, empty.detail) == ("warn", "empty brings nothing: its import registers no variant")
    assert "call register_variant" in empty.fix
    assert broken.detail.startswith("broken brings no variants: "), "one line, not two that contradict each other"


@pytest.mark.parametrize(
    ("group", "is_meant"),
    [
        ("tunedcomm.variant", True),
        ("tunedcomm.kernels", True),
        ("tunedcom.variants", True),
        ("TunedComm.Variants", True),
        ("tunedcomm_variants", True),
        ("tunedcomm.variants", False),
        ("console_scripts", False),
        ("torch.backends", False),
    ],
)
def test_an_entry_point_in_a_group_that_means_nothing(
    group: str, is_meant: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:

    info = tmp_path / "nice_variants-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nice-variants\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\nnice = nice\nother = nice\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(plugins, "brought", {})
    monkeypatch.setattr(plugins, "failed", {})
    (check,) = doctor.check_packages()
    assert check.level == ("warn" if is_meant else "ok")
    if is_meant:
        assert f"nice-variants has an entry point in the group {group!r}" in check.detail
        assert "did you mean 'tunedcomm.variants'?" in check.detail
        assert "install it again" in check.fix


def test_settings_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEDCOMM_PEER_TIMEOUT_S", "soon")
    monkeypatch.setenv("TUNEDCOMM_TIMEOUT", "3")
    monkeypatch.setenv("TUNEDCOMM_FORCE_ALL_REDUCE", "three_shot")
    found = list(doctor.check_variables())
    failed = " ".join(check.detail for check in found if check.level == "fail")
    warned = " ".join(check.detail for check in found if check.level == "warn")
    assert "TUNEDCOMM_PEER_TIMEOUT_S='soon'" in failed
    assert "three_shot" in failed
    assert "TUNEDCOMM_TIMEOUT" in warned


@pytest.mark.parametrize(
    ("version", "level"), [(None, "fail"), ("2.8.1", "fail"), ("2.9.0", "ok"), ("2.13.0+cpu", "ok"), ("2.10.0a1", "ok")]
)
def test_old_and_missing_packages_fail(monkeypatch: pytest.MonkeyPatch, version: str | None, level: str) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: version)
    assert by_name(list(doctor.check_versions()), "torch").level == level


def test_triton_too_old_for_the_host_backend_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: "3.6.0")
    check = by_name(list(doctor.check_symmetric_memory()), "host backend")
    assert check.level == "warn"
    assert "triton>=3.9" in check.fix


def test_a_check_that_raises_is_a_line() -> None:
    def check_nothing() -> Iterator[Line]:
        raise OSError("no such device")
        yield

    found = doctor.run_checks((check_nothing, doctor.check_versions))
    assert found[0].level == "fail"
    assert found[0].name == "nothing"
    assert "no such device" in found[0].detail
    assert by_name(found, "python").level == "ok"


@pytest.mark.parametrize(("level", "code"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_exit_code(monkeypatch: pytest.MonkeyPatch, level: doctor.Level, code: int) -> None:
    def checks(**options: object) -> list[Line]:
        return [Line("links", level, "found", "" if level == "ok" else "do this")]

    monkeypatch.setattr("tunedcomm.cli.doctor.run_checks", checks)
    plain = CliRunner().invoke(main.app, ["doctor"])
    assert plain.exit_code == code
    assert plain.stdout.startswith(level)
    shown = CliRunner().invoke(main.app, ["doctor", "--json"])
    assert shown.exit_code == code
    assert json.loads(shown.stdout)[0]["level"] == level


def test_a_package_whose_import_does_not_end_is_named(tmp_path: Path) -> None:
    (tmp_path / "sleepy.py").write_text("import time; time.sleep(600)\n")
    info = tmp_path / "sleepy_variants-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sleepy-variants\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tunedcomm.variants]\nnice = sleepy\n")
    code = (
        "from tunedcomm.cli import doctor, main\n"
        "doctor.IMPORT_S, doctor.NOTE_S = 0.5, 0.2\n"
        "main.run(['doctor', '--json'])\n"
    )
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "sleepy-variants" in done.stderr
    lines = json.loads(done.stdout)
    (stuck,) = [line for line in lines if line["level"] == "fail" and line["name"] == "variants"]
    assert "sleepy-variants" in stuck["detail"]
    assert lines[-1]["name"] != "variants", "the checks after it are made, too"
