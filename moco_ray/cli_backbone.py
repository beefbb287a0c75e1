"""The commands about what a run made, and what others made: export, import, detect. Not here: what they do.
"""

import argparse
import math
from collections.abc import Callable

from moco_ray.errors import UserError


def backbone_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add them; `command` makes a parser from a name, a function and a line of help."""
    export = command("export", _export, "write the trained backbone in the format of another tool")
    export.add_argument("place", metavar="RUN|CHECKPOINT|FILE", help="a run folder (its newest checkpoint), RUN/checkpoints/step-N.aM.pt, or a .safetensors of ours")
    export.add_argument("--to", required=True, metavar="FORMAT", help="safetensors torchvision timm transformers detectron2 mmpretrain onnx torchscript moco")
    export.add_argument("--output", metavar="PATH", help="a file or folder that does not exist yet, or a URI (a name in this folder)")

    take = command("import", _import, "make a backbone of ours from another trainer's checkpoint")
    take.add_argument("file", metavar="FILE", help="of the released MoCo, solo-learn, lightly, VISSL, OpenSelfSup, MMSelfSup, torchvision or timm; a path or a URI")
    take.add_argument("--output", metavar="FILE", help="a new .safetensors file (FILE's name with -backbone.safetensors, in this folder)")
    take.add_argument("--stem", choices=("imagenet", "small_stride1", "small_stride2"), help="needed where the first convolution is 3x3")
    take.add_argument("--partial", action="store_true", help="take what fits, and draw what is missing anew")
    take.add_argument("--image-pixels", type=int, default=224, help="side of the images that it was trained on (224)")
    take.add_argument("--mean", type=float, nargs=3, default=(0.485, 0.456, 0.406), metavar=("R", "G", "B"), help="of pixels in 0..1 (ImageNet's)")
    take.add_argument("--std", type=float, nargs=3, default=(0.229, 0.224, 0.225), metavar=("R", "G", "B"), help="of pixels in 0..1 (ImageNet's)")

    detect = command("detect", _detect, "fine-tune a detector on boxes in COCO's format, from a backbone and from scratch, side by side")
    detect.add_argument("place", metavar="RUN|CHECKPOINT|FILE", help="as for export")
    detect.add_argument("--images", required=True, metavar="FOLDER", help="images on this machine")
    detect.add_argument("--annotations", required=True, metavar="FILE", help="their boxes, COCO's JSON")
    detect.add_argument("--test-images", metavar="FOLDER", help="of the test set (--images)")
    detect.add_argument("--test-annotations", metavar="FILE", help="boxes of a test set (a fifth of the images is held out)")
    detect.add_argument("--steps", type=int, default=1000, help="of training, for each of the two (1000)")
    detect.add_argument("--batch-size", type=int, default=8, help="images a step (8)")
    detect.add_argument("--learning-rate", type=float, help="(0.02 for 16 images a step, in proportion to --batch-size)")
    detect.add_argument("--image-pixels", type=int, default=480, help="shorter side that images are resized to (480)")
    detect.add_argument("--seed", type=int, default=0, help="of new layers, order and flips, the same for both (0)")
    detect.add_argument("--output", metavar="FOLDER", help="for detection.json, detection.md and detections.png (the run folder; needed for a file)")


def _export(arguments: argparse.Namespace) -> None:
    from moco_ray.export import export

    print(export(arguments.place, arguments.to, arguments.output))


def _import(arguments: argparse.Namespace) -> None:
    from moco_ray.backbone import Preprocessing
    from moco_ray.foreign import import_file

    pixels = arguments.image_pixels
    mean, std = arguments.mean, arguments.std
    if not 8 <= pixels <= 4096 or not all(math.isfinite(value) for value in (*mean, *std)) or min(std) <= 0.0:
        raise UserError(f"--image-pixels {pixels} must be 8 to 4096, --mean {mean} and --std {std} finite, and --std above 0")
    preprocessing = Preprocessing(round(pixels * 256 / 224), pixels, tuple(arguments.mean), tuple(arguments.std))
    print(import_file(arguments.file, arguments.output, preprocessing, arguments.stem, arguments.partial))


def _detect(arguments: argparse.Namespace) -> None:
    from moco_ray.detect import Places, detect
    from moco_ray.detection.detector import FineTuning

    rate = 0.02 * arguments.batch_size / 16 if arguments.learning_rate is None else arguments.learning_rate
    settings = FineTuning(arguments.steps, arguments.batch_size, rate, arguments.image_pixels, arguments.seed)
    places = Places(arguments.images, arguments.annotations, arguments.test_images, arguments.test_annotations)
    print(detect(arguments.place, places, settings, arguments.output))
