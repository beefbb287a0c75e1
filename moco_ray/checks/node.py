"""What one machine tells of itself: versions, clock, memory, limits, network. Runs on each node, in a task.

Responsible for looking; whether it will do is judged in machines.py. Knows no Ray.
"""

import hashlib
import os
import platform
import resource
import shutil
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from moco_ray import source
from moco_ray.data.storage import Store, one_line
from moco_ray.errors import UserError
from moco_ray.interface import addresses, interface_of
from moco_ray.method.encoder import cpu_has_bfloat16

PACKAGES = ("moco_ray", "ray", "torch", "torchvision")
SHARED_MEMORY = "/dev/shm"
TENSORBOARD_PORT = 6006


class Node(NamedTuple):
    """One machine, as it sees itself."""

    versions: dict[str, str]
    time: float  # UNIX seconds
    shared_memory_bytes: int  # free; 0 if there is none
    open_files: int  # the limit of a process
    has_bfloat16: bool  # its CPU
    gpus: int  # devices of NVIDIA's driver, whether Ray knows of them or not
    cuda_build: bool  # of torch
    machine: str  # the same for nodes that share one, and its network
    address: str  # in Ray
    interface: str  # that gloo will use; "" for that of the host's name
    interface_address: str
    can_listen: str  # "" or why a process cannot listen at that address
    tensorboard_port_free: bool
    unread: str  # "" or why the data cannot be read from here
    unshared: str  # "" or why the storage cannot be read from here


def ask(data: Store | None, name: str, storage: Store | None, probe: str) -> Callable[[str], Node]:
    """The question for each node: it reads the first byte of `data`/`name`, and `storage`/`probe` (None: not asked)."""
    return partial(_node, (data, name), (storage, probe))


def _node(data: tuple[Store | None, str], storage: tuple[Store | None, str], address: str) -> Node:
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0] or interface_of(address) or ""
    return Node(
        versions=versions(),
        time=time.time(),
        shared_memory_bytes=shutil.disk_usage(SHARED_MEMORY).free if Path(SHARED_MEMORY).is_dir() else 0,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        has_bfloat16=cpu_has_bfloat16(),
        gpus=len(list(Path("/dev").glob("nvidia[0-9]*"))),
        cuda_build=torch.version.cuda is not None,
        machine=_network_of(),
        address=address,
        interface=name,
        interface_address=(used := addresses().get(name, "") if name else of_own_name()),
        can_listen=_listening(used or address),
        tensorboard_port_free=not _listening("127.0.0.1", TENSORBOARD_PORT),
        unread=_unreadable(*data),
        unshared=_unreadable(*storage),
    )


def versions() -> dict[str, str]:
    """Of what computes, and a digest of moco_ray's own source: two checkouts may call themselves alike."""
    digest = hashlib.sha256()
    package = Path(__file__).parent.parent
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    found = {"python": platform.python_version(), **source.versions(PACKAGES)}
    return found | {"moco_ray's source": digest.hexdigest()[:8]}


def of_own_name() -> str:
    """The address that the host's name stands for, which gloo uses by itself; "" if it stands for none."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def _listening(address: str, port: int = 0) -> str:
    """"" if a process can listen there (0: at some free port), else why not."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((address, port))
            sock.listen()
        except OSError as error:
            return one_line(error)
    return ""


def _network_of() -> str:
    """The machine's boot and the network namespace of this process: where both are alike, loopback leads to the other."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def _unreadable(store: Store | None, name: str) -> str:
    try:
        if store is not None:
            store.read(name, 0, 1)
    except UserError as error:
        return str(error)
    return ""
