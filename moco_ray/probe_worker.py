"""One rank of a training on labels, as Ray Train calls it in each of its processes.

Responsible for the rank's images, its test rows, and for the state after each epoch, from which a restarted group of workers goes on.
Not responsible for the loop (evaluate/probe.py) nor for starting workers (launch_probe.py).

The state lies in the output folder under a name made from all that decides the result. Every attempt writes the same course,
so a worker that was cut off and writes on can only write what is true, at worst of an earlier epoch.
"""

import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import ray.train.torch
import torch
from torch import Tensor, nn

from moco_ray.backbone import Backbone
from moco_ray.board import Wire, new_attempt
from moco_ray.data.augment import normalise
from moco_ray.data.batch import Batch
from moco_ray.data.segment import Source
from moco_ray.data.storage import Store, one_line
from moco_ray.data.stream import batches_of, labelled_images
from moco_ray.data.subset import Subset
from moco_ray.errors import StorageFailing, UserError
from moco_ray.evaluate.features import BATCH_ROWS, LabelledSet
from moco_ray.evaluate.probe import Network, Student, new_head, train
from moco_ray.evaluate.protocols import Protocol
from moco_ray.evaluate.scores import Scores, Tally
from moco_ray.method.batchnorm import GroupedBatchNorm2d
from moco_ray.method.encoder import build_backbone, working_dtype
from moco_ray.plan import Plan
from moco_ray.ranks import Ranks
from moco_ray.session import Room


@dataclass(frozen=True)
class Kept:
    """Where the state lies between epochs."""

    folder: str  # URI
    about: dict[str, Any]  # JSON: all that decides the result

    @property
    def name(self) -> str:
        digest = hashlib.sha256(json.dumps(self.about, sort_keys=True).encode()).hexdigest()[:16]
        return f"probe/{self.about['protocol']}-{digest}.pt"

    def write(self, state: dict[str, Any]) -> None:
        buffer = io.BytesIO()
        torch.save({"about": self.about, "state": state}, buffer)
        Store(self.folder).write(self.name, buffer.getvalue())

    def read(self) -> dict[str, Any] | None:
        """None if there is none. Raises UserError if it is damaged."""
        store = Store(self.folder)
        if store.size(self.name) is None:
            return None
        try:
            return torch.load(io.BytesIO(store.read(self.name)), map_location="cpu", weights_only=True)["state"]
        except UserError:
            raise
        except Exception as error:  # torch names no few
            raise UserError(f"{store.place(self.name)} cannot be read ({one_line(error)}); remove it, and the protocol begins anew") from error

    def remove(self) -> None:
        Store(self.folder).delete(self.name)


@dataclass(frozen=True)
class ProbeJob:
    """What every rank is told by the driver."""

    protocol: Protocol
    backbone: bytes  # a .safetensors file of ours
    training: LabelledSet
    test: LabelledSet
    labels: np.ndarray  # R int64: of all rows of the training set
    classes: int
    subset: Subset | None  # of the training rows; None: all
    kept: Kept
    board: Any  # see board.py

    @property
    def plan(self) -> Plan:
        return Plan(self.protocol.recipe, len(self.subset.rows) if self.subset else self.training.manifest.rows)


def probe_worker(config: dict[str, Any]) -> None:
    """One rank. Raises what stops it; an error that no restart can cure is told to the driver first."""
    job, room = config["job"], config["room"]
    device = ray.train.torch.get_device()
    if device.type == "cpu":
        torch.set_num_threads(room.worker_cpus)
    ranks = Ranks.current(device)
    attempt = ranks.gather_objects(new_attempt(job.board) if ranks.is_first else None)[0]
    wire = Wire(job.board, attempt, ranks.rank)
    try:
        _carry(job, room, ranks, wire)
    except StorageFailing:
        raise  # it may pass
    except UserError as error:
        wire.fail(error)
        raise
    finally:
        wire.close()


def _carry(job: ProbeJob, room: Room, ranks: Ranks, wire: Wire) -> None:
    recipe, plan = job.protocol.recipe, job.plan
    student = _student(job, ranks.device)
    state = job.kept.read()
    if state is not None:
        student.load_state_dict(state)
    epochs = ranks.gather_objects(student.epoch)
    if len(set(epochs)) > 1:  # somebody wrote meanwhile; another start will see one state
        raise RuntimeError(f"the ranks read states of different epochs: {epochs}")
    if ranks.is_first and student.epoch:
        wire.tell(kind="resumed", epoch=student.epoch)
    start = student.epoch * plan.steps_per_epoch
    source = Source(job.training.manifest, recipe, plan, job.subset)
    rows = _counted(batches_of(source, ranks.world, ranks.rank, start, room.data_place_beside(ranks)), wire, start)

    def finished(held: Student) -> None:
        if ranks.is_first:
            job.kept.write(held.state_dict())
            wire.tell(kind="epoch", entry=held.history[-1])

    train(student, rows, torch.from_numpy(job.labels), plan, ranks, _Test(job, ranks), finished)


def _counted(rows: Iterator[Batch], wire: Wire, start: int) -> Iterator[Batch]:
    """The same; the driver hears of the step that is at work."""
    for wire.step, batch in enumerate(rows, start + 1):
        yield batch


def _student(job: ProbeJob, device: torch.device) -> Student:
    """The same on every rank: the backbone's values, and a classifier drawn from the seed."""
    held, recipe = Backbone.of_bytes(job.backbone, "the backbone"), job.protocol.recipe
    if job.protocol.tuned:  # normalised in groups of rows, so that the number of workers changes nothing
        backbone = build_backbone(held.name, held.stem, partial(GroupedBatchNorm2d, group_rows=recipe.batch.bn_group_size))
        backbone.load_state_dict(held.tensors)
    else:
        backbone = held.module()
    return Student.new(backbone, new_head(held.features, job.classes, recipe.run.seed), job.protocol, device)


class _Test:
    """This rank's share of the test rows, judged after each epoch; the features of a frozen backbone are made once and kept."""

    def __init__(self, job: ProbeJob, ranks: Ranks):
        self._job, self._ranks = job, ranks
        self._features: list[tuple[Tensor, Tensor]] | None = None

    def __call__(self, network: Network) -> Scores:
        tally = Tally(self._job.classes, self._ranks.device)
        if network.tuned:
            features: Any = self._described(network.backbone)
        else:
            features = self._features = self._features or list(self._described(network.backbone))
        for x, y in features:
            tally.add(network.head(x), y)
        return tally.scores(self._ranks)

    def _described(self, backbone: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """Features and labels, on the device."""
        recipe, ranks, test = self._job.protocol.recipe, self._ranks, self._job.test
        share = np.array_split(test.rows, ranks.world)[ranks.rank]
        for batch in labelled_images(test.manifest, recipe, share, BATCH_ROWS, ranks.world):
            if len(batch.labels):
                x = normalise(batch.crops.to(ranks.device), recipe.augment, working_dtype(recipe.encoder))
                yield backbone(x), batch.labels.clone().to(ranks.device)
