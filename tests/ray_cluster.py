"""A Ray cluster of two nodes on this machine, for the tests of ``remote=``.

As a program: runs the cluster in a folder until the process that asked for it has ended, or the
file "stop" is there. It is no descendant of the tests, which look for processes that they leave.
Files in the folder: "address" once it runs; the tests make "add" to get a third node, which ends
at once when they make "kill".
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}


def await_file(path: Path, gone: bool = False, seconds: float = 250) -> None:
    """Waits until a file is there, or is gone."""
    end = time.monotonic() + seconds
    while path.exists() == gone:
        assert time.monotonic() < end, f"{path} after {seconds} s"
        time.sleep(0.05)


def started(folder: Path) -> str:
    """Starts a cluster; returns its address. It ends with ``stopped(folder)``."""
    environment = {**os.environ, "HOME": str(folder), "TMPDIR": str(folder), "PYTHONWARNINGS": "ignore"}
    environment["RAY_worker_niceness"] = "0"  # not 15: other tests keep the cores busy
    tests = Path(__file__).parent
    environment["PYTHONPATH"] = os.pathsep.join([str(tests.parent), str(tests)])
    command = ["setsid", "--fork", sys.executable, __file__, str(folder), str(os.getpid())]
    with open(folder / "log", "wb") as log:
        subprocess.run(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, check=True)
    await_file(folder / "address")
    return (folder / "address").read_text()


def stopped(folder: Path) -> None:
    """Ends the cluster and removes the folder."""
    (folder / "stop").touch()
    await_file(folder, gone=True)


def actors(folder: Path) -> list[int]:
    """Process ids of the actors of this cluster; of others the machine may have more."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            if (path.parent / "cmdline").read_bytes().startswith(b"ray::Actor"):
                parent = path.read_text().rpartition(")")[2].split()[1]
                if os.fsencode(folder) in Path("/proc", parent, "cmdline").read_bytes():  # its raylet
                    found.append(int(path.parent.name))
        except OSError:  # it has ended
            continue
    return found


def await_actors(folder: Path, number: int, seconds: float = 60) -> list[int]:
    """Waits until as many actors live; returns their process ids."""
    end = time.monotonic() + seconds
    while len(found := actors(folder)) != number:
        assert time.monotonic() < end, (found, number)
        time.sleep(0.05)
    return found


def _serve(folder: Path, asked_by: int) -> None:
    from ray.cluster_utils import Cluster

    head = {**NODE, "include_dashboard": False, "temp_dir": str(folder / "ray")}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    more = None
    try:
        cluster.add_node(**NODE)
        (folder / "address.new").write_text(cluster.address)
        (folder / "address.new").rename(folder / "address")
        while not (folder / "stop").exists() and os.path.exists(f"/proc/{asked_by}"):
            if (folder / "add").exists() and more is None:
                more = cluster.add_node(**NODE, resources={"third": 1})
                (folder / "add").unlink()
            if (folder / "kill").exists() and more is not None:
                cluster.remove_node(more, allow_graceful=False)
                more = None
                (folder / "kill").unlink()
            time.sleep(0.05)
    finally:
        cluster.shutdown()
        shutil.rmtree(folder)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), int(sys.argv[2]))
