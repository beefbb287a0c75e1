"""Two hosts of one Ray cluster on this machine, and the cable between them: network namespaces. Needs root.

Responsible for the namespaces, the head in one, a node in the other that is started again when it ends, and the link.
Not responsible for what runs there.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from tests.clusters import FAST_CHECKS, free_port, kill_tree, start_ray, train_workers, wait_until

HEAD_ADDRESS, NODE_ADDRESS = "10.77.0.1", "10.77.0.2"


class Hosts:
    """Host A with the head, host B with a node, one cable. The interface has another name on each host.

    Both have a host name that means 127.0.0.1, as Debian gives it: who asks for the address of the host name gets one
    that the other host cannot use. When its raylet ends, B starts it again, as a supervisor does.
    """

    def __init__(self, head_cpus: int = 2, node_cpus: int = 2, interfaces: tuple[str, str] = ("eth0", "ens5")):
        self.folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # short: it holds sockets
        self._names = (f"ha{os.getpid()}", f"hb{os.getpid()}")
        self._interfaces, self._node_cpus, self._port = interfaces, node_cpus, free_port()
        self.address = f"{HEAD_ADDRESS}:{self._port}"
        self._closing, self._supervisor = threading.Event(), None
        self._processes: list[subprocess.Popen] = []
        try:
            self._lay_cable()
            words = ("--head", f"--port={self._port}", f"--node-ip-address={HEAD_ADDRESS}", "--include-dashboard=False")
            self.head = self._start_ray(0, head_cpus, *words, "--disable-usage-stats")
            wait_until(lambda: len(self.living()) == 1, 90, "the head in A")
            self._supervisor = threading.Thread(target=self._keep_node, daemon=True)
            self._supervisor.start()
            wait_until(lambda: len(self.living()) == 2, 90, "the node in B")
        except BaseException:
            self.close()
            raise

    @property
    def environment(self) -> dict[str, str]:
        """What a driver in A needs in its environment."""
        return {"RAY_ADDRESS": self.address, "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": str(self.folder / "a")}

    def run_in_a(self, argv: list[str], env: dict[str, str], **popen) -> subprocess.Popen:
        """A process on host A, in a session of its own; ended at the latest with the hosts."""
        process = subprocess.Popen([*self._inside(0), *argv], env=env, start_new_session=True, **popen)
        self._processes.append(process)
        return process

    def link_down(self) -> None:
        """Pull the cable: packets are lost without a word."""
        self._ip(0, "link", "set", self._interfaces[0], "down")

    def link_up(self) -> None:
        self._ip(0, "link", "set", self._interfaces[0], "up")

    def living(self) -> list[str]:
        """Addresses of the nodes that the head counts alive; it is asked in A, where alone it answers."""
        code = (
            "from ray._raylet import GcsClient\n"
            f"for info in GcsClient(address='{self.address}').get_all_node_info(timeout=5).values():\n"
            "    if info.state == 0: print(info.node_manager_address)"
        )
        asked = subprocess.run(
            [*self._inside(0), sys.executable, "-c", code], env=self._env(0), capture_output=True, text=True
        )
        return asked.stdout.split()

    def train_workers_in_b(self) -> list[int]:
        return train_workers(self.node.pid)

    def close(self) -> None:
        self._closing.set()
        for process in self._processes:
            kill_tree(process)
        if self._supervisor:
            self._supervisor.join()
        for name in self._names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _lay_cable(self) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        ends = [word for name, end in zip(self._names, self._interfaces, strict=True) for word in (end, name)]
        cable = [
            "ip",
            "link",
            "add",
            ends[0],
            "netns",
            ends[1],
            "type",
            "veth",
            "peer",
            "name",
            ends[2],
            "netns",
            ends[3],
        ]
        subprocess.run(cable, check=True)
        for side, address in enumerate((HEAD_ADDRESS, NODE_ADDRESS)):
            self._ip(side, "address", "add", f"{address}/24", "dev", self._interfaces[side])
            self._ip(side, "link", "set", self._interfaces[side], "up")
            self._ip(side, "link", "set", "lo", "up")

    def _ip(self, side: int, *words: str) -> None:
        subprocess.run(["ip", "-n", self._names[side], *words], check=True)

    def _inside(self, side: int) -> tuple[str, ...]:
        """Words before a command that runs on a host: its network, and a host name that means 127.0.0.1."""
        hosts = self.folder / "hosts"
        hosts.write_text("127.0.0.1 localhost\n" + "".join(f"127.0.0.1 {name}\n" for name in self._names))
        script = f'mount --bind {hosts} /etc/hosts && hostname {self._names[side]} && exec "$@"'
        return ("ip", "netns", "exec", self._names[side], "unshare", "--uts", "--mount", "sh", "-c", script, "sh")

    def _env(self, side: int) -> dict[str, str]:
        tmp = self.folder / "ab"[side]
        tmp.mkdir(exist_ok=True)
        variables = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "GLOO_SOCKET_IFNAME")}
        return {**variables, **FAST_CHECKS, "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": str(tmp)}

    def _start_ray(self, side: int, cpus: int, *words: str) -> subprocess.Popen:
        log = self.folder / f"{'ab'[side]}.log"
        process = start_ray("ab"[side], cpus, *words, log=log, env=self._env(side), before=self._inside(side))
        self._processes.append(process)
        return process

    def _keep_node(self) -> None:
        while not self._closing.is_set():
            words = (f"--address={self.address}", f"--node-ip-address={NODE_ADDRESS}")
            self.node = self._start_ray(1, self._node_cpus, *words)
            while self.node.poll() is None and not self._closing.is_set():
                self._closing.wait(0.2)
            kill_tree(self.node)
            self._closing.wait(1)
