"""A Ray cluster that starts nodes when they are asked for and ends them when they are idle: Ray's fake autoscaling.

Responsible for the autoscaler's configuration. Not responsible for the rest of a cluster (see `Cluster`).
"""

import json

from tests.clusters import STORE_BYTES, Cluster

# All that Ray's own template would fill in is given, empty: the template is not in Ray's wheel.
EMPTY_COMMANDS = (
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
    "rsync_exclude",
    "rsync_filter",
)


class FakeAutoscaling(Cluster):
    """A head without CPUs, whose autoscaler starts up to `max_nodes` nodes of `node_cpus` (as processes below the head)."""

    def __init__(self, max_nodes: int = 3, node_cpus: int = 2, idle_seconds: float = 10):
        self._max_nodes, self._node_cpus, self._idle_seconds = max_nodes, node_cpus, idle_seconds
        super().__init__(head_cpus=0, variables={"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"})

    def _head_words(self) -> tuple[str, ...]:
        file = self.folder / "autoscaling.json"
        file.write_text(json.dumps(self._configuration()))
        return (f"--autoscaling-config={file}",)

    def _configuration(self) -> dict:
        resources = {"CPU": self._node_cpus, "object_store_memory": STORE_BYTES}
        return {
            "cluster_name": "fake",
            "provider": {
                "type": "fake_multinode",
                "gcs_address": self.address,
                "use_node_id_as_ip": True,
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
            },
            "max_workers": self._max_nodes,
            "upscaling_speed": 10,
            "idle_timeout_minutes": self._idle_seconds / 60,
            "head_node_type": "ray.head.default",
            "available_node_types": {
                "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
                "worker": {
                    "resources": resources,
                    "node_config": {},
                    "min_workers": 0,
                    "max_workers": self._max_nodes,
                },
            },
            "auth": {},
            "docker": {},
            "file_mounts": {},
            "cluster_synced_files": [],
            "file_mounts_sync_continuously": False,
            **{name: [] for name in EMPTY_COMMANDS},
        }
