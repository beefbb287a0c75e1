"""`moco-ray detect`: a pre-trained backbone and the same one untrained, each fine-tuned as a detector's, beside each other.

Responsible for the two arms, which differ in nothing but the backbone's first weights, and for the report. In this process, on its
GPU if it has one. Not responsible for the training (detection/detector.py) nor for the measure (detection/judge.py).
"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from moco_ray.backbone import SUFFIX, Backbone, read_backbone, read_checkpoint
from moco_ray.data.storage import Store
from moco_ray.detection import coco, detector, judge
from moco_ray.detection.coco import CocoSet
from moco_ray.detection.detector import FineTuning
from moco_ray.detection.picture import detections_picture
from moco_ray.errors import UserError
from moco_ray.method.encoder import build_backbone

SHOWN = 4  # test images in the picture
PRETRAINED, UNTRAINED = "pre-trained", "from scratch"


class Places(NamedTuple):
    """Where the images and boxes lie: COCO JSON files and the folders of their images, on this machine."""

    images: str
    annotations: str
    test_images: str | None = None  # None: as `images`
    test_annotations: str | None = None  # None: a fifth of the images is held out


@dataclass(frozen=True, eq=False)
class Arm:
    """One fine-tuning and what came of it."""

    name: str
    losses: list[float]  # of each step
    seen: list[list[detector.Sample]]  # by each step
    found: list[judge.Found]  # in each test image
    precision: judge.Precision
    seconds: float  # of training

    @property
    def row(self) -> judge.Row:
        last = self.losses[-max(1, len(self.losses) // 10) :]
        return judge.Row(self.name, self.precision, sum(last) / len(last))


def detect(place: str, places: Places, settings: FineTuning, output: str | None) -> str:
    """The table as text; also detection.json, detection.md and detections.png in `output`, by default the run's folder.

    `place` is what `read_backbone` takes. Progress goes to standard error. Raises UserError for what cannot be read, measured or
    trained.
    """
    judge.pycocotools()
    backbone, store = _opened(place, output)
    train, test = _sets(places, settings.seed)
    order = detector.batches(len(train.pictures), settings)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    networks = {PRETRAINED: backbone.module(), UNTRAINED: untrained(backbone, settings.seed)}
    arms = [_arm(name, network, backbone, (train, test), order, settings, device) for name, network in networks.items()]
    assert all(arm.seen == order for arm in arms), "the arms must see the same images in the same order"
    about = _about(backbone, train, test, settings, places, device)
    _write(store, arms, about, backbone, (train, test), settings)
    return f"{judge.as_text([arm.row for arm in arms])}\n({about})\n{store.place('detections.png')}: what they find in some test images"


def untrained(backbone: Backbone, seed: int) -> nn.Module:
    """The same architecture with torchvision's initialisation, drawn from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_backbone(backbone.name, backbone.stem)


def _opened(place: str, output: str | None) -> tuple[Backbone, Store]:
    if place.partition("?")[0].endswith(SUFFIX):
        if not output:
            raise UserError(f"{place} is a file: give --output FOLDER for the result")
        return read_backbone(place), Store.at(output)
    trained = read_checkpoint(place)
    return trained.backbone(), Store.at(output) if output else trained.folder.store


def _sets(places: Places, seed: int) -> tuple[CocoSet, CocoSet]:
    """Images to train on, those with boxes, and images to test on."""
    if places.test_images and not places.test_annotations:
        raise UserError(f"--test-images {places.test_images} without --test-annotations; give the COCO JSON file of their boxes")
    whole = coco.read(places.annotations, places.images)
    if places.test_annotations:
        train, test = whole, coco.read(places.test_annotations, places.test_images or places.images, whole.classes)
    else:
        train, test = coco.hold_out(whole, seed)
    if not test.boxes:
        raise UserError(f"the {len(test.pictures)} test images have no box: there is nothing to measure; give a test set with boxes")
    return train.trainable(), test


def _arm(
    name: str, network: nn.Module, backbone: Backbone, sets: tuple[CocoSet, CocoSet], order: list, settings: FineTuning, device: torch.device
) -> Arm:
    train, test = sets
    model = detector.build_detector(network, backbone, len(train.classes.ids), settings).to(device)

    def report(step: int, loss: float) -> None:
        print(f"{name}: step {step}/{settings.steps}, loss {loss:.3f}, {step / (time.monotonic() - began):.1f} steps/s", file=sys.stderr, flush=True)

    began = time.monotonic()
    losses, seen = detector.fine_tune(model, train.pictures, order, settings, report)
    seconds = time.monotonic() - began
    found = detector.find(model, test.pictures)
    return Arm(name, losses, seen, found, judge.average_precision(test.pictures, found, test.classes), seconds)


def _about(backbone: Backbone, train: CocoSet, test: CocoSet, settings: FineTuning, places: Places, device: torch.device) -> str:
    step = f", step {backbone.origin['step']}" if "step" in backbone.origin else ""
    kind = "others" if places.test_annotations else "held out by the seed"
    about = (
        f"AP in per cent, COCO's; Faster R-CNN with a feature pyramid on {backbone.name}{step}, all layers and BatchNorm trained; "
        f"{len(train.pictures)} images with {train.boxes} boxes of {len(train.classes.ids)} classes, tested on {len(test.pictures)} {kind} "
        f"with {test.boxes} boxes; {settings.steps} steps of {settings.batch_size}, rate {settings.learning_rate:g}, {settings.image_pixels} "
        f"pixels, seed {settings.seed}, {device.type}; one run each, so small differences may be chance"
    )
    skipped = train.degenerate_boxes + (test.degenerate_boxes if places.test_annotations else 0)
    return about + (f"; {skipped} boxes without an area are left out" if skipped else "")


def _write(store: Store, arms: list[Arm], about: str, backbone: Backbone, sets: tuple[CocoSet, CocoSet], settings: FineTuning) -> None:
    train, test = sets
    rows = [arm.row for arm in arms]
    held: dict[str, Any] = {
        "about": about,
        "backbone": {"name": backbone.name, "stem": backbone.stem, **backbone.origin},
        "settings": asdict(settings),
        "sets": {
            name: {"annotations": one.place, "images": len(one.pictures), "boxes": one.boxes, "degenerate_boxes_in_file": one.degenerate_boxes}
            for name, one in (("train", train), ("test", test))
        },
        "classes": dict(zip(train.classes.names, train.classes.ids, strict=True)),
        "arms": {arm.name: {**arm.precision._asdict(), "losses": arm.losses, "training_seconds": arm.seconds} for arm in arms},
    }
    shown = [number for number, picture in enumerate(test.pictures) if len(picture.boxes)][:SHOWN]
    picture = detections_picture(
        [test.pictures[n] for n in shown], {arm.name: [arm.found[n] for n in shown] for arm in arms}, test.classes
    )
    store.write("detections.png", picture)
    store.write("detection.json", json.dumps(held, indent=1).encode())
    store.write("detection.md", f"{judge.as_markdown(rows)}\n\n{about}\n".encode())
