"""The ops on 2 GPUs where processes see their GPUs in different ways: all of them, one each, or in another order.

    python tests/gpu/run_views.py                        all views
    python tests/gpu/run_views.py one permuted_on_all    some of them; "commands" stands for tune and doctor

VIEW_KERNELS=1 forces all kernels of every op in the views `all` and `one`.

Prints what each rank says, the times of each view over those of `all`, and one line that begins with OK for each view
that gave the bits of `all`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# View to each rank's GPUs, in the order of its process, and the number of its own among them.
VIEWS = {
    "all": (("0,1", 0), ("0,1", 1)),
    "one": (("0", 0), ("1", 0)),
    "permuted_on_one": (("0,1", 0), ("1,0", 0)),
    "permuted_on_all": (("1,0", 0), ("1,0", 1)),
}
BODIES = {
    "bodies": "symmetric,dispatch",
    "view_bodies": "environment,memory,ops,graphs,autotune,times",
}
QUICK = {"view_bodies": "environment,memory,ops,graphs,times"}


def importable(*folders: Path) -> str:
    """PYTHONPATH with folders before the caller's."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def launch(view: str, folder: str, module: str, bodies: str, **more: str) -> tuple[list[int], list[str]]:
    """Run bodies on both ranks of a view: their exit codes and what they said."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    known = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",") if name]
    processes = []
    database = Path(folder, f"{view}-{module}", "user.db")  # files beside it, such as checks, are not of other launches
    database.parent.mkdir(exist_ok=True)
    for rank, (gpus, index) in enumerate(VIEWS[view]):
        environment = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2",
            "LOCAL_RANK": str(index), "CUDA_VISIBLE_DEVICES": ",".join(known[int(gpu)] for gpu in gpus.split(",")),
            "VIEW": view, "VIEW_FOLDER": folder, "PYTHONPATH": importable(ROOT, ROOT / "tests", HERE),
            "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
            "NCCL_NVLS_ENABLE": "0", "TUNEDCOMM_PEER_TIMEOUT_S": "5", "TUNEDCOMM_DB": str(database),
            "TUNEDCOMM_BORROW": "no",  # checks of what siblings lend are part of a snapshot's digest
            "DUMP_AFTER_S": "200", "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        }  # fmt: skip
        log = Path(folder, f"said-{rank}")
        with log.open("w") as file:
            command = [sys.executable, str(HERE / "run_bodies.py"), module, bodies]
            process = subprocess.Popen(
                command, env={**os.environ, **environment, **more}, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT
            )
        processes.append((process, log))
    end = time.monotonic() + 230
    while any(process.poll() is None for process, _ in processes) and time.monotonic() < end:
        if any(process.poll() for process, _ in processes):
            end = min(end, time.monotonic() + 25)  # the other rank ends by itself, or never
        time.sleep(0.2)
    for process, _ in processes:
        process.kill()
    return [process.wait() for process, _ in processes], [log.read_text() for _, log in processes]


def main(views: list[str]) -> int:
    """Run the views and compare them; 1 if anything is wrong."""
    times: dict[str, list[dict[str, float]]] = {}
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="views-") as folder:
        seen: dict[str, set[str]] = {}
        for view in dict.fromkeys(["all", *(view for view in views if view in VIEWS)]):
            begin = time.monotonic()
            for module, bodies in (BODIES if view == "one" else QUICK).items():
                more = {"VIEW_KERNELS": "1"} if os.environ.get("VIEW_KERNELS") and view in ("all", "one") else {}
                codes, said = launch(view, folder, module, bodies, **more)
                lines = [line for text in said for line in text.splitlines() if line.startswith(("{", "OK"))]
                sys.stdout.write(f"{view} {module} {codes}\n" + "".join(f"  {line}\n" for line in lines))
                for line in lines:
                    if line.startswith("{") and "digest" in (found := json.loads(line)):
                        seen.setdefault(view, set()).add(f"{found['digest']} {found['snapshot']}")
                times.setdefault(view, []).extend(
                    found["us"] for line in lines if line.startswith("{") and "us" in (found := json.loads(line))
                )
                if codes != [0, 0]:
                    wrong.append(f"{view} {module} ended with {codes}, see above")
                    sys.stdout.write("".join(text[-6000:] for text in said))
                    break  # the view's other launches would only take time
            if codes == [-9, -9]:  # both hung: the next view's would, too
                break
            if view == "one":
                wrong += killed_peer(view, folder)
            if view != "all":
                absent = [name for name in ("all", view) if not all(results(name, folder, r).exists() for r in (0, 1))]
                if absent:
                    wrong.append(f"{view} is not compared: {absent[0]} has no results, see the first WRONG")
                else:
                    wrong += compare(view, folder)
                    if seen.get(view) != seen.get("all") or len(seen.get(view, ())) != 1:
                        wrong.append(f"{view}: environment and snapshot are {seen.get(view)}, not {seen.get('all')}")
            sys.stdout.write(f"  {time.monotonic() - begin:.0f} s\n")
            sys.stdout.flush()
        report(times)
        if "commands" in views:
            wrong += commands(folder)
    sys.stdout.write("".join(f"WRONG {each}\n" for each in wrong) or "all views are right\n")
    return bool(wrong)


def killed_peer(view: str, folder: str) -> list[str]:
    """Kill one rank: the other gives up within its bound."""
    codes, said = launch(view, folder, "bodies", "lost_peer", LOST_VARIANT="two_shot", LOST_MODE="graph")
    waits = [json.loads(line)["waited"] for line in said[0].splitlines() if line.startswith("{")]
    sys.stdout.write(f"  a killed peer: {codes} {waits}\n")
    if codes == [0, -9] and waits and waits[0] <= 7:
        return []
    sys.stdout.write("".join(text[-3000:] for text in said))
    return [f"{view}: a killed peer, see above"]


def results(view: str, folder: str, rank: int) -> Path:
    """Where a rank leaves the results of its calls."""
    return Path(folder, f"{view}-ops-{rank}.pt")


def compare(view: str, folder: str) -> list[str]:
    """The calls in which a view's bits are not those of the view `all`."""
    found = []
    for rank in range(2):
        here, there = (torch.load(results(name, folder, rank)) for name in (view, "all"))
        common = here.keys() & there.keys()
        same = [
            title for title in common
            if len(here[title]) == len(there[title]) and all(map(torch.equal, here[title], there[title]))
        ]  # fmt: skip
        found += [f"{view}: {title} on rank {rank}" for title in sorted(common - set(same))]
        if len(common) < 60:
            found.append(f"{view}: only {len(common)} calls in common")
    if not found:
        sys.stdout.write(f"OK {view}: {len(common)} calls of each rank give the bits of all\n")
    return found


def report(times: dict[str, list[dict[str, float]]]) -> None:
    """Print all_reduce's times of the view `all` over those of each view."""
    for view, found in times.items():
        if not found or not times.get("all"):
            continue
        slowest = {size: max(each[size] for each in found) for size in found[0]}
        base = {size: max(each[size] for each in times["all"]) for size in slowest}
        ratios = {size: round(base[size] / slowest[size], 3) for size in slowest}
        sys.stdout.write(f"times {view}: {slowest} us; all over it {ratios}\n")


def commands(folder: str) -> list[str]:
    """Commands with one GPU in sight, and with both in another order."""
    wrong = []
    variables = {**os.environ, "PYTHONPATH": importable(ROOT), "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
                 "NCCL_NVLS_ENABLE": "0", "TUNEDCOMM_DB": f"{folder}/tune.db"}  # fmt: skip
    for gpus, arguments in (
        ("1", ["doctor"]),
        ("1,0", ["doctor"]),
        ("1,0", ["tune", "--op", "all_reduce", "--shape", "4096", "--budget", "20s"]),
    ):
        try:
            done = subprocess.run(
                [sys.executable, "-m", "tunedcomm.cli.main", *arguments],
                env={**variables, "CUDA_VISIBLE_DEVICES": gpus},
                capture_output=True, text=True, timeout=120, check=False, cwd=ROOT,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            wrong.append(str(error))
            continue
        sys.stdout.write(
            f"CUDA_VISIBLE_DEVICES={gpus} {' '.join(arguments)}: {done.returncode}\n{done.stdout[-1500:]}\n"
        )
        if done.returncode not in (0, 1 if arguments == ["doctor"] else 0):
            wrong.append(f"{' '.join(arguments)} with {gpus}")
            sys.stdout.write(done.stderr[-2000:])
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [*VIEWS, "commands"]))
