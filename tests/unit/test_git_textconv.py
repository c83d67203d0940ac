"""`git diff` of two databases, with the configuration that docs/shipping.md tells."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from db_samples import problem, trial
from transfer_samples import store

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(repository: Path, *arguments: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    alone = {**clean, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull, "PYTHONPATH": str(ROOT)}
    who = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org")
    done = subprocess.run(
        ["git", *who, *arguments], cwd=repository, env=alone, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def documented() -> list[list[str]]:
    """The `git config` lines of the page, with this interpreter's tunedcomm."""
    text = (ROOT / "docs" / "shipping.md").read_text(encoding="utf-8")
    here = f"{shlex.quote(sys.executable)} -m tunedcomm.cli.main"
    lines = [shlex.split(line) for line in re.findall(r"^git (config .*)$", text, re.MULTILINE)]
    return [[re.sub(r"^tunedcomm\b", here, word) for word in line] for line in lines]


def test_git_diff_of_a_database_is_readable_once_configured(tmp_path: Path) -> None:
    here = tmp_path / "repository"
    here.mkdir()
    git(here, "init", "--quiet")
    shutil.copy(ROOT / ".gitattributes", here)
    records = [trial("one_shot", 5.0, final=True, problem=problem(1 << n)) for n in range(10, 14)]
    store(here / "tuned.db", records)
    git(here, "add", ".gitattributes", "tuned.db")
    git(here, "commit", "--quiet", "--message", "before")
    (here / "tuned.db").unlink()
    for side in here.glob("tuned.db-*"):
        side.unlink()
    records[1] = trial("lamport", 3.25, final=True, problem=problem(1 << 11))
    store(here / "tuned.db", records)
    assert "Binary files a/tuned.db and b/tuned.db differ" in git(here, "diff", "tuned.db")
    for arguments in documented():
        git(here, *arguments)
    text = git(here, "diff", "tuned.db")
    assert "Binary files" not in text
    gone, new = ([s for s in text.splitlines() if s[:1] == sign and '"kind":"trial"' in s] for sign in "-+")
    # Runs have other times, so every trial refers to another one; the one that changed says so itself.
    assert any('"variant":"one_shot"' in line and '"shape":"1024"' in line for line in gone)
    assert any('"variant":"lamport"' in line and '"latency_p50_us":3.25' in line for line in new)
    assert not any('"variant":"lamport"' in line for line in gone)


def test_attributes_name_the_driver_of_the_page() -> None:
    (name,) = {arguments[-2].split(".")[1] for arguments in documented()}
    assert f"*.db binary diff={name}\n" in (ROOT / ".gitattributes").read_text(encoding="utf-8")
