"""What Ray Train calls in each of its processes: the rank's work, and what it needs of Ray Train.

Apart from launch.py, for a process imports what its function's module imports, and a restart waits for that.
"""

from functools import partial
from typing import Any

import ray
import ray.train
import ray.train.torch

from moco_ray.checkpoint import Saved
from moco_ray.cluster import living
from moco_ray.data.storage import Store
from moco_ray.meter import hardware
from moco_ray.placement import DataPlace
from moco_ray.session import Room
from moco_ray.worker import Node, Place, carry


def train_worker(config: dict[str, Any]) -> None:
    """One rank of a run: what Ray Train calls in each of its processes."""
    room: Room = config["room"]
    node = ray.get_runtime_context().get_node_id()
    name = living().get(node, node[:8])
    device = ray.train.torch.get_device()

    def data_place(seats: list[str]) -> DataPlace:
        return room.data_place(len(seats), seats, node)

    place = Place(device, Node(node, name, hardware(device)), room.worker_cpus, data_place, partial(_point, config["job"].run))
    carry(config["job"], place)


def _point(run: str, saved: Saved, is_first: bool) -> None:
    """Tell Ray Train of a checkpoint that is whole, for its own records and tasks. A collective; does not wait for Ray.

    A pointer: Ray insists that a checkpoint lies in its own folder, so it is told a place there where nothing is; what
    goes with it names ours. Ray keeps all of them, for what it does not keep it deletes.
    """
    ray.train.report(
        {"step": saved.step, "uri": Store(run).place(f"{saved.name}.pt"), "sha256": saved.sha256, "bytes": saved.bytes},
        checkpoint=ray.train.Checkpoint(f"/{saved.name}") if is_first else None,
        checkpoint_dir_name=saved.name.rpartition("/")[2],
        checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
        delete_local_checkpoint_after_upload=False,
        checkpoint_upload_fn=_as_if_uploaded,
    )


def _as_if_uploaded(pointer: ray.train.Checkpoint, name: str) -> ray.train.Checkpoint:
    """Ray's upload of a checkpoint; ours is in the storage already."""
    storage = ray.train.get_context().get_storage()
    return ray.train.Checkpoint(f"{storage.experiment_fs_path}/{name}", storage.storage_filesystem)
