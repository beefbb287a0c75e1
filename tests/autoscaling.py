"""A Ray cluster that starts nodes when they are asked for and ends them when they are idle: Ray's fake autoscaling.

Responsible for the autoscaler's configuration. Not responsible for the rest of a cluster (see `Cluster`). Both of Ray's autoscalers: the first, which
`ray up` starts, and the second, which KubeRay starts.
"""

import json

from ray.autoscaler._private.fake_multi_node import node_provider

from tests.clusters import STORE_BYTES, Cluster

HEAD_TYPE, HEAD_ID = node_provider.FAKE_HEAD_NODE_TYPE, node_provider.FAKE_HEAD_NODE_ID
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

    def __init__(self, max_nodes: int = 3, node_cpus: int = 2, idle_seconds: float = 10, second: bool = False):
        """`second`: Ray's second autoscaler."""
        self._max_nodes, self._node_cpus, self._idle_seconds, self._second = max_nodes, node_cpus, idle_seconds, second
        variables = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_enable_autoscaler_v2": str(int(second))}
        if second:
            variables |= {"RAY_CLOUD_INSTANCE_ID": HEAD_ID, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID, "RAY_NODE_TYPE_NAME": HEAD_TYPE}
        super().__init__(head_cpus=0, variables=variables)

    def allow(self, max_nodes: int) -> None:
        """From now on so many nodes are to be had, as on a day when there is more of spot machines."""
        self._max_nodes = max_nodes
        self._write()

    def workers(self) -> int:
        """How many nodes live beside the head."""
        return len(self.living()) - 1

    def _head_words(self) -> tuple[str, ...]:
        self._write()
        return (f"--autoscaling-config={self._file}",)

    @property
    def _file(self):
        return self.folder / "autoscaling.json"

    def _write(self) -> None:
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(self._configuration()))
        part.replace(self._file)

    def _configuration(self) -> dict:
        resources = {"CPU": self._node_cpus, "object_store_memory": STORE_BYTES}
        fake = f"{node_provider.__name__}.{node_provider.FakeMultiNodeProvider.__name__}"
        return {
            "cluster_name": "fake",
            "provider": {
                # by its own name Ray's second autoscaler would look for the template
                **({"type": "external", "module": fake, "launch_multiple": True, "head_node_id": HEAD_ID} if self._second else {"type": "fake_multinode"}),
                "gcs_address": self.address,
                "use_node_id_as_ip": True,
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
            },
            "max_workers": self._max_nodes,
            "upscaling_speed": 10,
            "idle_timeout_minutes": self._idle_seconds / 60,
            "head_node_type": HEAD_TYPE,
            "available_node_types": {
                HEAD_TYPE: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
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
