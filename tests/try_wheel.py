"""What `make wheel-check` runs in an environment that holds nothing but the installed wheel.

The shipped databases are in the package, it is typed and licensed, `tunedcomm doctor` works, and two processes sum
through it.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tempfile
from pathlib import Path

SUM = """
import torch, torch.distributed as dist, tunedcomm
dist.init_process_group("gloo")
rank = dist.get_rank()
for variant in (None, "one_shot"):
    x = torch.arange(4096, dtype=torch.float32) + rank
    if variant is None:
        y = tunedcomm.all_reduce(x)
    else:
        with tunedcomm.force("all_reduce", variant):
            y = tunedcomm.all_reduce(x)
    assert torch.equal(y, 2 * torch.arange(4096, dtype=torch.float32) + 1), (variant, y)
dist.destroy_process_group()
print("rank", rank, "sums right")
"""


def main() -> None:
    import tunedcomm
    from tunedcomm.db.layers import packaged_databases

    package = Path(tunedcomm.__file__).parent
    assert package.is_relative_to(sys.prefix), f"{package} is not what the wheel installed in {sys.prefix}"
    databases = packaged_databases()
    assert databases, "the wheel holds no database"
    assert all(path.is_relative_to(package) for path in databases), databases
    assert (package / "py.typed").exists(), "the wheel is not marked as typed"
    assert (package / "report" / "page.css").exists(), "the wheel lacks the report's style"
    about = importlib.metadata.metadata("tunedcomm")
    assert about["License-Expression"] == "BSD-3-Clause", about["License-Expression"]
    files = importlib.metadata.files("tunedcomm") or []
    assert any(file.name == "LICENSE" for file in files), "the wheel holds no licence"
    for group in ("vllm.general_plugins", "sglang.srt.plugins"):
        (entry,) = importlib.metadata.entry_points(group=group, name="tunedcomm")
        entry.load()()
    command = str(Path(sys.executable).with_name("tunedcomm"))
    doctor = subprocess.run([command, "doctor", "--json"], capture_output=True, text=True, check=False)
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    json.loads(doctor.stdout)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "sum.py")
        script.write_text(SUM, encoding="utf-8")
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
        done = subprocess.run(launch, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("sums right") == 2, done.stdout
    names = ", ".join(path.name for path in databases)
    sys.stdout.write(f"tunedcomm {about['Version']} from its wheel: {names}; doctor and all_reduce on 2 ranks work\n")


if __name__ == "__main__":
    main()
