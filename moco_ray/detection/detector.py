"""torchvision's Faster R-CNN on a ResNet of ours: built, fine-tuned and asked. In one process, on one device.

Responsible for the network, for one arm's training and for what it finds. Not responsible for the data (coco.py), for the
measure (judge.py), nor for where the weights come from.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN

from moco_ray.backbone import Backbone
from moco_ray.detection.coco import Picture
from moco_ray.detection.judge import Found
from moco_ray.errors import UserError

PUBLISHED_PIXELS = 800  # of the shorter side, for which anchors of 32 to 512 pixels are meant
LONGER_SIDE = 1333 / PUBLISHED_PIXELS
REGIONS_PER_IMAGE = 128  # that train the box head: Fast R-CNN's, a quarter of torchvision's, for a short training on small images
PYRAMID_CHANNELS = 256
SETTLING_STEPS = 50  # whose batches BatchNorm's statistics are estimated on before a test
READERS = 4  # threads
_TAG = 0xDE


@dataclass(frozen=True)
class FineTuning:
    """How both arms are trained. Raises UserError for what cannot be."""

    steps: int
    batch_size: int
    learning_rate: float
    image_pixels: int  # of the shorter side
    seed: int

    def __post_init__(self):
        if min(self.steps, self.batch_size) < 1 or self.seed < 0:
            raise UserError(f"--steps {self.steps} and --batch-size {self.batch_size} must be at least 1, --seed {self.seed} at least 0")
        if not 64 <= self.image_pixels <= 4096:  # 64: the last map still has 2x2 places for BatchNorm
            raise UserError(f"--image-pixels {self.image_pixels} must be 64 to 4096")
        if not 0 < self.learning_rate < 100:
            raise UserError(f"--learning-rate {self.learning_rate} must be above 0 and below 100")

    def rate_at(self, step: int) -> float:
        """Linear warm-up over a tenth of the steps, at most 100; a tenth after 18/24 of them, a hundredth after 22/24 (VOC's 24k)."""
        warmup = min(100, self.steps // 10)
        drops = (step >= self.steps * 18 / 24) + (step >= self.steps * 22 / 24)
        return self.learning_rate * min(1.0, (step + 1) / (warmup + 1)) * 0.1**drops


class Sample(NamedTuple):
    """One image of a batch."""

    row: int
    flipped: bool  # left to right


def batches(rows: int, settings: FineTuning) -> list[list[Sample]]:
    """What each step sees: epochs of all rows in an order drawn from (seed, epoch), cut into batches; half of them flipped."""
    wanted, flow, epoch = settings.steps * settings.batch_size, [], 0
    while len(flow) < wanted:
        draw = np.random.default_rng([_TAG, settings.seed, epoch])
        flow += [Sample(int(row), bool(flip)) for row, flip in zip(draw.permutation(rows), draw.random(rows) < 0.5, strict=True)]
        epoch += 1
    return [flow[first : first + settings.batch_size] for first in range(0, wanted, settings.batch_size)]


def build_detector(resnet: nn.Module, backbone: Backbone, classes: int, settings: FineTuning) -> FasterRCNN:
    """Faster R-CNN with a feature pyramid over the four stages of `resnet`, of the architecture and for the pixels of `backbone`.

    Every layer is trained on, BatchNorm too, and the pyramid's new layers have one (He et al. 2019, section 4.2). All that is not
    `resnet` is drawn from the seed alone. Anchors keep their published proportion to the image.
    """
    stages = {f"layer{n}": str(n - 1) for n in (1, 2, 3, 4)}
    widths = [backbone.features // 2**n for n in (3, 2, 1, 0)]
    scale = settings.image_pixels / PUBLISHED_PIXELS
    anchors = AnchorGenerator(tuple((2**n * scale,) for n in range(5, 10)), ((0.5, 1.0, 2.0),) * 5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        pyramid = BackboneWithFPN(resnet, stages, widths, PYRAMID_CHANNELS, norm_layer=nn.BatchNorm2d)
        return FasterRCNN(
            pyramid, classes + 1, settings.image_pixels, round(settings.image_pixels * LONGER_SIDE), backbone.preprocessing.mean, backbone.preprocessing.std,
            rpn_anchor_generator=anchors, box_batch_size_per_image=REGIONS_PER_IMAGE,
        )  # fmt: skip


def fine_tune(
    detector: FasterRCNN, pictures: Sequence[Picture], order: list[list[Sample]], settings: FineTuning, report: Callable[[int, float], None]
) -> tuple[list[float], list[list[Sample]]]:
    """Train it where it lies, by SGD (momentum 0.9, weight decay 1e-4); the loss of each step, and what was seen.

    `report` gets step and loss ten times. torchvision draws which regions train from the global generator: it is seeded by
    (seed, step) and put back. BatchNorm's statistics are estimated anew at the end, as each step's are of few images. Raises
    UserError when the loss is no longer finite.
    """
    device = next(detector.parameters()).device
    optimizer = torch.optim.SGD(detector.parameters(), settings.learning_rate, momentum=0.9, weight_decay=1e-4)
    every, losses, seen = max(1, settings.steps // 10), [], []
    detector.train()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for step, (samples, images, targets) in enumerate(_read(pictures, order, device)):
            torch.manual_seed(int(np.random.SeedSequence([_TAG, settings.seed, step]).generate_state(1)[0]))
            for group in optimizer.param_groups:
                group["lr"] = settings.rate_at(step)
            loss = sum(detector(images, targets).values())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            seen.append(samples)
            if (step + 1) % every == 0 or step + 1 == settings.steps:
                _refuse_divergence(losses, every)
                report(step + 1, float(losses[-1]))
        settle_batchnorm(detector, (images for _, images, _ in _read(pictures, order[-SETTLING_STEPS:], device)))
    return torch.stack(losses).tolist(), seen


def _refuse_divergence(losses: list[Tensor], every: int) -> None:
    finite = torch.isfinite(torch.stack(losses))
    if not bool(finite.all()):
        raise UserError(f"the loss was not finite at step {int(finite.int().argmin()) + 1}; give a lower --learning-rate than now, or more --batch-size")


@torch.no_grad()
def settle_batchnorm(detector: FasterRCNN, images: Iterator[list[Tensor]]) -> None:
    """Running mean and variance of every BatchNorm become the mean over these batches', by the weights as they are now (PreciseBN)."""
    norms = [one for one in detector.modules() if isinstance(one, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain mean of what follows
    detector.train()
    for batch in images:
        detector.backbone(detector.transform(batch)[0].tensors)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


@torch.no_grad()
def find(detector: FasterRCNN, pictures: Sequence[Picture]) -> list[Found]:
    """What it finds in each picture, in evaluation mode: at most 100 boxes with a score above 0.05, on the CPU."""
    device = next(detector.parameters()).device
    detector.eval()
    found = []
    for _, images, _ in _read(pictures, [[Sample(row, False)] for row in range(len(pictures))], device):
        (one,) = detector(images)
        found.append(Found(one["boxes"].cpu(), one["labels"].cpu(), one["scores"].cpu()))
    return found


Batch = tuple[list[Sample], list[Tensor], list[dict[str, Tensor]]]


def _read(pictures: Sequence[Picture], order: list[list[Sample]], device: torch.device) -> Iterator[Batch]:
    """Batches in order: samples; 3,H,W float32 in 0..1; torchvision's targets. Images are decoded two batches ahead."""
    with ThreadPoolExecutor(READERS) as pool:
        waiting: deque = deque()
        for samples in order:
            waiting.append((samples, [pool.submit(_example, pictures[one.row], one.flipped) for one in samples]))
            if len(waiting) > 2:
                yield _gathered(*waiting.popleft(), device)
        while waiting:
            yield _gathered(*waiting.popleft(), device)


def _gathered(samples: list[Sample], tasks: list, device: torch.device) -> Batch:
    read = [task.result() for task in tasks]
    images = [pixels.to(device).float() / 255 for pixels, _ in read]
    return samples, images, [{key: value.to(device) for key, value in target.items()} for _, target in read]


def _example(picture: Picture, flipped: bool) -> tuple[Tensor, dict[str, Tensor]]:
    pixels, boxes = picture.pixels(), picture.boxes
    if flipped:
        pixels = pixels.flip(-1)
        boxes = torch.stack([picture.width - boxes[:, 2], boxes[:, 1], picture.width - boxes[:, 0], boxes[:, 3]], 1)
    return pixels, {"boxes": boxes, "labels": picture.labels}
