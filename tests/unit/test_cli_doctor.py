from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli_samples import real_trial, record, run
from db_samples import H200, problem, trial
from programs import python

from tunedcomm.cli import doctor
from tunedcomm.cli.output import Line
from tunedcomm.db import targets
from tunedcomm.db.store import Database
from tunedcomm.kernels import plugins
from tunedcomm.spec import get_op


def by_name(checks: list[Line], name: str) -> Line:
    return next(check for check in checks if check.name == name)


def test_every_line_is_complete() -> None:
    checks = doctor.run_checks()
    assert {"python", "torch", "triton", "gpus", "host backend", "shared memory", "user database"} <= {
        check.name for check in checks
    }
    for check in checks:
        assert check.detail
        assert check.fix or check.level == "ok", f"{check.name} does not say what to do"


def databases(name: str) -> Line:
    """The last line about a user or site database."""
    return [check for check in doctor.check_databases() if check.name == f"{name} database"][-1]


def test_databases_are_judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing = databases("user")
    assert (missing.level, "tunedcomm tune" in missing.detail) == ("ok", True)
    damaged = tmp_path / "damaged.db"
    monkeypatch.setenv("TUNEDCOMM_DB_PATH", str(damaged))
    gone = databases("site")
    assert (gone.level, "TUNEDCOMM_DB_PATH" in gone.fix) == ("fail", True)
    damaged.write_bytes(b"no database at all " * 100)
    assert "repair" in databases("site").fix
    monkeypatch.setenv("TUNEDCOMM_DB", str(damaged))
    found = databases("user")
    assert (found.level, str(damaged) in found.detail) == ("fail", True)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_home_that_cannot_be_written_is_a_warning_with_the_fix(
    is_there: bool, ordinary_user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ordinary_user / "share" / "tuned.db"
    monkeypatch.setenv("TUNEDCOMM_DB", str(path))
    if is_there:
        Database.open(path, create=True).close()
        path.chmod(0o444)
    else:
        path.parent.mkdir()
    path.parent.chmod(0o555)
    if os.geteuid() == 0:
        os.seteuid(65534)
    found = databases("user")
    assert (found.level, "TUNEDCOMM_DB" in found.fix, str(path) in found.detail) == ("warn", True, True)
    assert "fail" not in {check.level for check in doctor.check_databases()}


def test_an_empty_server_is_no_failure(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEDCOMM_DB", postgres_url)
    found = databases("user")
    assert (found.level, "empty" in found.detail, "tunedcomm tune" in found.detail) == ("ok", True, True)
    Database.open(postgres_url, create=True).close()
    assert "0 problems" in databases("user").detail


@pytest.mark.parametrize("part", ["all", "library", "one"])
def test_a_machine_is_tuned_where_an_op_is_at_its_default_sizes(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "environment_here", lambda: H200)
    monkeypatch.setattr("tunedcomm.db.layers.packaged_databases", list)
    sizes = get_op("all_reduce").default_shapes("cuda", 2)
    kinds = ["library"] if part == "library" else ["library", "one_shot"]
    shapes = sizes[: 1 if part == "one" else None]
    with Database.open(os.environ["TUNEDCOMM_DB"], create=True) as database:
        database.record(trial(kind, problem=problem(2 * shape[0])) for shape in shapes for kind in kinds)
    (found,) = doctor.check_this_machine()
    assert found.level == ("ok" if part == "all" else "warn")
    assert ("all_reduce" in found.detail) == (part != "library")
    assert bool(found.fix) == (part != "all")


def test_network_file_system_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(targets, "file_system", lambda path, mounts: "nfs4")
    (check,) = [c for c in doctor.check_databases() if c.level == "warn"]
    for part in ("nfs4", str(tmp_path / "user.db"), "TUNEDCOMM_DB_PATH", "PostgreSQL"):
        assert part in check.detail
    monkeypatch.setenv("TUNEDCOMM_DB_NETWORK", "no")
    assert all(c.level == "ok" for c in doctor.check_databases())


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Line]]:
    """A function that checks packages of which some bring variants and some fail."""

    def checked(brought: dict[str, list[str]], failed: dict[str, str]) -> list[Line]:
        monkeypatch.setattr(plugins, "brought", brought)
        monkeypatch.setattr(plugins, "failed", failed)
        return list(doctor.check_packages())

    return checked


def test_packages_with_variants_are_named(packages: Callable[..., list[Line]]) -> None:
    good, bad = packages({"nice": ["all_reduce.swap"]}, {"broken": "ImportError: z"})
    assert (good.level, good.detail) == ("ok", "nice brings all_reduce.swap")
    assert (bad.level, "broken" in bad.detail) == ("warn", True)
    empty, broken = packages({"empty": [], "broken": []}, {"broken": "ImportError: z"})
    assert (empty.level, "register_variant" in empty.fix) == ("warn", True)
    assert "ImportError" in broken.detail, "one line, not two that contradict each other"
    (none,) = packages({}, {})
    assert none.level == "ok"


def pretend_package(folder: Path, entry_points: str) -> None:
    """The metadata of an installed package nice-variants."""
    info = folder / "nice_variants-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nice-variants\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)


@pytest.mark.parametrize(
    ("group", "is_meant"),
    [
        ("tunedcomm.variant", True),
        ("tunedcom.variants", True),
        ("TunedComm.Variants", True),
        ("tunedcomm_variants", True),
        ("tunedcomm.variants", False),
        ("console_scripts", False),
    ],
)
def test_an_entry_point_in_a_group_that_means_nothing(
    group: str,
    is_meant: bool,
    packages: Callable[..., list[Line]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    pretend_package(tmp_path, f"[{group}]\nnice = nice\nother = nice\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (check,) = packages({}, {})
    assert check.level == ("warn" if is_meant else "ok")
    if is_meant:
        assert all(part in check.detail for part in ("nice-variants", repr(group), "'tunedcomm.variants'"))


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
    ("version", "level"), [("", "fail"), ("2.8.1", "fail"), ("2.9.0", "ok"), ("2.13.0+cpu", "ok"), ("2.10.0a1", "ok")]
)
def test_old_and_missing_packages_fail(monkeypatch: pytest.MonkeyPatch, version: str, level: str) -> None:
    monkeypatch.setattr(doctor, "version_of", lambda package: version)
    assert by_name(list(doctor.check_versions()), "torch").level == level


def test_triton_too_old_for_the_host_backend_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version_of", lambda package: "3.6.0")
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
def test_exit_code(monkeypatch: pytest.MonkeyPatch, level: str, code: int) -> None:
    line = Line("links", level, "found", "" if level == "ok" else "do this")
    monkeypatch.setattr("tunedcomm.cli.doctor.run_checks", lambda **options: [line])
    plain, shown = run("doctor"), run("doctor", "--json")
    assert (plain.code, shown.code, shown.json[0]["level"]) == (code, code, level)
    assert plain.out.startswith(level)


def test_a_package_whose_import_does_not_end_is_named(tmp_path: Path) -> None:
    (tmp_path / "sleepy.py").write_text("import time; time.sleep(600)\n")
    pretend_package(tmp_path, "[tunedcomm.variants]\nnice = sleepy\n")
    settings = "doctor.IMPORT_S, doctor.NOTE_S = 0.5, 0.2"
    code = f"from tunedcomm.cli import doctor, main; {settings}; main.run(['doctor', '--json'])"
    done = python("-c", code, paths=[tmp_path], timeout=60, code=1, CUDA_VISIBLE_DEVICES="")
    assert "nice-variants" in done.stderr
    lines = json.loads(done.stdout)
    (stuck,) = [line for line in lines if line["level"] == "fail" and line["name"] == "variants"]
    assert "nice-variants" in stuck["detail"]
    assert lines[-1]["name"] != "variants", "the checks after it are made, too"


ENGINE_FILES = {
    "vllm/platforms/cuda.py": "class CudaPlatformBase:\n    def get_device_communicator_cls(): ...\n",
    "vllm/compilation/passes/fusion/allreduce_rms_fusion.py": "if 1:\n  def call_trtllm_fused_allreduce_norm(): ...\n",
    "vllm/distributed/device_communicators/cuda_communicator.py": "class CudaCommunicator:\n"
    + "".join(f"    def {n}(): ...\n" for n in ("all_reduce", "all_gather", "custom_all_gather", "all_gatherv")),
}


def test_an_installed_engine_is_read_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lines() -> dict[str, tuple[str, str]]:
        return {line.name: (line.level, line.detail) for line in doctor.check_engine("vllm")}

    assert lines()["vllm"] == ("warn", "is not installed")
    for name, text in ENGINE_FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('not to be imported')\n")
    for package, entries in (
        ("vllm", ""),
        ("other", "[vllm.general_plugins]\ntunedcomm = tunedcomm_plugin:register\n"),
    ):
        info = tmp_path / f"{package}-0.28.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.28.1\n")
        (info / "entry_points.txt").write_text(entries)
    monkeypatch.syspath_prepend(str(tmp_path))
    record(tmp_path / "tuned.db", real_trial("host_one_shot", 5.0, environment=doctor.environment_here()))
    monkeypatch.setenv("TUNEDCOMM_DB_PATH", str(tmp_path / "tuned.db"))
    found = lines()
    assert found["vllm"] == ("ok", "0.28.1; tested with 0.28 to 0.33")
    assert found["entry point"][0] == "ok"
    assert "of 1 measured problems" in found["all_reduce"][1]
    assert found["all_gather"] == ("warn", "all_gather, custom_all_gather, all_gatherv: nothing measured")
    assert "has no custom_reduce_scatter, reduce_scatter, reduce_scatterv" in found["reduce_scatter"][1]
    monkeypatch.setenv("VLLM_PLUGINS", "")
    assert lines()["entry point"][0] == "warn"
    monkeypatch.setenv("VLLM_PLUGINS", "tunedcomm,other")
    assert lines()["entry point"][0] == "ok"
    monkeypatch.setenv("TUNEDCOMM_ENGINES", "0")
    assert "TUNEDCOMM_ENGINES" in lines()["entry point"][1]
    assert run("doctor", "--engine", "vllm").code == 0
    assert run("doctor", "--engine", "trl").code == 2
    fsdp = {line.name: line for line in doctor.check_engine("fsdp")}
    assert list(fsdp) == ["torch", "all_gather", "reduce_scatter"], "the hooks are there, and no entry point is asked"
