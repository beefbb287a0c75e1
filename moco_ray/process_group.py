"""The torch process group of a group of workers, as Ray Train makes it: sturdier than its own.

Responsible for the network interface that gloo uses, for trying again where the group does not come together, and for not
waiting at its end for a rank that hangs. Not responsible for what is sent in it (ranks.py).
"""

import os

import ray
import ray.train.torch
from ray.exceptions import RayActorError, RayTaskError

from moco_ray.interface import interface_of


class _Backend(ray.train.torch.TorchConfig().backend_cls):
    """Runs in Ray Train's controller."""

    def on_start(self, worker_group, backend_config) -> None:
        """Ray Train starts workers again after a RayActorError, and ends the run at any other."""
        try:
            worker_group.execute(use_interface_of_ray)
            super().on_start(worker_group, backend_config)
        except RayTaskError as error:
            raise RayActorError(error_msg=f"the process group did not come together: {error}") from error

    def on_shutdown(self, worker_group, backend_config) -> None:
        """Nothing: the processes are ended next, and one that hangs in a collective would be waited for (30 s)."""


class ProcessGroup(ray.train.torch.TorchConfig):
    """Ray Train's configuration of the process group; `timeout_s` is how long ranks wait for each other."""

    @property
    def backend_cls(self):
        return _Backend


def use_interface_of_ray() -> None:
    """On a worker: let gloo use the interface of its node's address in Ray.

    By itself gloo uses that of the host's name, which on many machines is the loopback: no other host can reach it.
    """
    name = interface_of(ray.util.get_node_ip_address())
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
