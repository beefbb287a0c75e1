"""A Ray cluster on this machine whose nodes can be added, drained and lost.

Responsible for the head and the nodes, each a tree of processes of its own, and for their end. Not responsible for the
commands that run on the cluster (see `Shell`), nor for networks between hosts (see `Hosts`).
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

# Asked for before Ray is imported: Ray's core reads it once. A token of an earlier local Ray would be demanded otherwise.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

from ray._raylet import GcsClient

STORE_BYTES = 150 << 20  # of each node's object store
# A node is dead after 3 checks of 1 s without an answer; it has time to begin. These are the head's, which tells the nodes.
FAST_CHECKS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_raylet_start_wait_time_s": "120",  # on a busy machine
}
ALIVE, DRAIN_FOR_PREEMPTION = 0, 2  # ray's GcsNodeInfo.GcsNodeState and autoscaler.DrainNodeReason


class Cluster:
    """A head, and nodes that come and go; all share the address of this machine."""

    def __init__(self, head_cpus: int = 0, variables: dict[str, str] | None = None):
        self.folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # short: it holds sockets
        self._variables = {
            **os.environ,
            **FAST_CHECKS,
            "RAY_AUTH_MODE": "disabled",
            "RAY_TMPDIR": str(self.folder),
            **(variables or {}),
        }
        self._variables.pop("RAY_ADDRESS", None)
        self.nodes: list[Node] = []
        self._drains: list[threading.Timer] = []
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        try:
            words = (f"--port={self.port}", "--include-dashboard=False", "--disable-usage-stats", *self._head_words())
            self.head = self._start("head", head_cpus, "--head", *words)
        except BaseException:
            self.close()
            raise

    @property
    def environment(self) -> dict[str, str]:
        """What a driver needs in its environment to run on this cluster."""
        return {"RAY_ADDRESS": self.address, "RAY_AUTH_MODE": "disabled"}

    def add_node(self, cpus: int, labels: str = "") -> "Node":
        """Start a node and wait until the cluster counts it. `labels`: key=value, key=value, .."""
        words = (f"--labels={labels}",) if labels else ()
        return self._start(f"node{len(self.nodes)}", cpus, f"--address={self.address}", *words)

    def wait_for_nodes(self, count: int, seconds: float = 60) -> None:
        """Wait until the cluster counts so many nodes alive, the head among them."""
        wait_until(lambda: len(self.living()) == count, seconds, f"{count} nodes alive")

    def living(self) -> dict[str, str]:
        """Id -> name of each node that the cluster counts alive; empty while the head does not answer."""
        try:
            infos = GcsClient(address=self.address).get_all_node_info(timeout=5)
        except Exception:  # noqa: BLE001 - Ray has several errors for a head that is not there yet, or no longer
            return {}
        return {info.node_id.hex(): info.node_name for info in infos.values() if info.state == ALIVE}

    def close(self) -> None:
        for drain in self._drains:
            drain.cancel()
            drain.join()
        for node in self.nodes:
            node.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _head_words(self) -> tuple[str, ...]:
        """More words for the head's `ray start`."""
        return ()

    def _start(self, name: str, cpus: int, *words: str) -> "Node":
        node = Node(self, name, start_ray(name, cpus, *words, log=self.folder / f"{name}.log", env=self._variables))
        self.nodes.append(node)
        wait_until(lambda: node.joined() or node.process.poll() is not None, 90, f"{name} to join")
        if node.process.poll() is not None:
            raise RuntimeError(f"ray start of {name} ended: {(self.folder / f'{name}.log').read_text()[-2000:]}")
        return node


class Node:
    """One node of a Cluster: `ray start --block` and all that came of it."""

    def __init__(self, cluster: Cluster, name: str, process: subprocess.Popen):
        self._cluster, self.name, self.process, self.node_id = cluster, name, process, ""

    def joined(self) -> bool:
        """Whether the cluster counts it; its id is known from then on."""
        self.node_id = next((id_ for id_, name in self._cluster.living().items() if name == self.name), "")
        return bool(self.node_id)

    def kill(self) -> None:
        """End it and all its workers at once, as a machine that loses its power."""
        kill_tree(self.process)

    def drain(self, seconds: float) -> None:
        """Give the notice of a preemption now, and kill the node when the seconds are over, as a cloud does."""
        deadline = time.time() + seconds
        accepted, reason = GcsClient(address=self._cluster.address).drain_node(
            self.node_id, DRAIN_FOR_PREEMPTION, "preempted by a test", int(deadline * 1000)
        )
        assert accepted, reason
        timer = threading.Timer(deadline - time.time(), self.kill)
        timer.daemon = True
        timer.start()
        self._cluster._drains.append(timer)

    def train_workers(self) -> list[int]:
        """Process ids of the Ray Train workers on it that run a loop, the oldest first."""
        return train_workers(self.process.pid)

    def kill_train_worker(self, index: int = 0) -> int:
        """SIGKILL one of its Ray Train workers; the node lives on. Returns the process id."""
        pid = self.train_workers()[index]
        os.kill(pid, signal.SIGKILL)
        return pid


def start_ray(name: str, cpus: int, *words: str, log: Path, env: dict[str, str], before: tuple[str, ...] = ()):
    """`ray start --block` of one node, as a process in a session of its own; `before` enters a namespace."""
    options = ("--block", f"--node-name={name}", f"--num-cpus={cpus}", "--num-gpus=0")
    store = f"--object-store-memory={STORE_BYTES}"
    # Ports are left to the system: those that Ray would take are the same for every node, and for every user of a machine.
    ports = ("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0")
    with log.open("ab") as file:
        return subprocess.Popen(
            [*before, sys.executable, "-m", "ray.scripts.scripts", "start", *words, *options, store, *ports],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )


def train_workers(root: int) -> list[int]:
    """Ray Train workers below a process, the oldest first."""
    return sorted(pid for pid, work in at_work(root).items() if "RayTrainWorker" in work)


def at_work(root: int) -> dict[int, str]:
    """Process id of each of Ray's workers below a process -> the name of the task or actor method that it runs now, or of its actor."""
    found = {}
    for pid in descendants(root):
        with contextlib.suppress(OSError):
            title = Path(f"/proc/{pid}/cmdline").read_bytes()
            if title.startswith(b"ray::"):
                found[pid] = title.decode(errors="replace").rstrip("\0 ")
    return found


def descendants(root: int) -> Iterator[int]:
    """A process and all below it, parents before children."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    waiting = [root]
    while waiting:
        pid = waiting.pop(0)
        yield pid
        waiting.extend(children.get(pid, []))


def kill_tree(process: subprocess.Popen) -> None:
    """SIGKILL a process of ours and all below it at once: all stand still before the first one dies."""
    if process.poll() is None:
        stopped: set[int] = set()
        while new := set(descendants(process.pid)) - stopped:
            for pid in new:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            stopped |= new
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.wait()


def free_port() -> int:
    """A port that is free now, and outside those that Ray gives to workers (10002-19999)."""
    while True:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        if not 10001 <= port <= 19999:
            return port


def wait_until(happened: Callable[[], bool], seconds: float, what: str) -> None:
    """Raises TimeoutError when it has not happened in so many seconds."""
    end = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(0.1)
