"""Detectron2's configs for an exported backbone: the settings that it needs anywhere, and the published C4 protocol on VOC and COCO.

Responsible for their text; they are complete, so nothing but Detectron2 and the data is needed. Not responsible for the weights
(export.py). Not run with Detectron2 itself: keys and values are compared with its documented defaults in the tests.
"""

from pathlib import Path

from moco_ray.backbone import Backbone
from moco_ray.method.encoder import BACKBONES

WEIGHTS = "backbone.pkl"

# He et al. 2019, appendix A.2 and A.3, as the released MoCo's detection/configs have it (commit 90e244a).
VOC = (
    "# Pascal VOC: Faster R-CNN, R50-C4, fine-tuned on trainval 2007 + 2012 for 24,000 steps, tested on 2007 test.\n",
    '  MASK_ON: False\n  ROI_HEADS:\n    NAME: "Res5ROIHeadsExtraNorm"\n    NUM_CLASSES: 20\n',
    "  MIN_SIZE_TRAIN: [480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800]\n",
    'DATASETS:\n  TRAIN: ["voc_2007_trainval", "voc_2012_trainval"]\n  TEST: ["voc_2007_test"]\n',
    "  STEPS: [18000, 22000]\n  MAX_ITER: 24000\n  WARMUP_ITERS: 100\n",
)
COCO = (
    "# COCO: Mask R-CNN, R50-C4, fine-tuned on train2017 by the 2x schedule, tested on val2017.\n",
    '  MASK_ON: True\n  ROI_HEADS:\n    NAME: "Res5ROIHeadsExtraNorm"\n    NUM_CLASSES: 80\n',
    "  MIN_SIZE_TRAIN: [640, 672, 704, 736, 768, 800]\n",
    'DATASETS:\n  TRAIN: ["coco_2017_train"]\n  TEST: ["coco_2017_val"]\n',
    "  STEPS: [120000, 160000]\n  MAX_ITER: 180000\n  WARMUP_ITERS: 1000\n",
)
PUBLISHED = {"voc_R_50_C4_24k.yaml": VOC, "coco_R_50_C4_2x.yaml": COCO}

_HOW = """\
# The published protocol of MoCo (He et al. 2019, appendix), complete in this file: every layer is trained on, BatchNorm too,
# synchronised over the 8 GPUs of 2 images each, and re-estimated before each test. Written by moco_ray; values of the released
# configs; not run with Detectron2 by us.
# Res5ROIHeadsExtraNorm, the BatchNorm after res5, is a class of the released MoCo's detection/train_net.py
# (github.com/facebookresearch/moco), not of Detectron2. So start with that script, where your data sets are:
#   python train_net.py --config-file {name} --num-gpus 8
# With Detectron2's own tools/train_net.py add MODEL.ROI_HEADS.NAME Res5ROIHeads: the same without that BatchNorm.
# On other numbers of GPUs keep IMS_PER_BATCH 16, or scale BASE_LR with it. After moving the folder, add MODEL.WEIGHTS PATH.
"""


def settings(backbone: Backbone) -> str:
    """What any config of Detectron2 needs for this backbone, as YAML, for any ResNet that it knows."""
    shallow = BACKBONES[backbone.name][0] != "Bottleneck"
    narrow = "    RES2_OUT_CHANNELS: 64\n" if shallow else ""
    own = (
        "# The published C4 configs lie beside this file; this one is for a config of your own.\n"
        if is_published(backbone)
        else f"# Published C4 configs are for a ResNet-50: there is none for a {backbone.name}, so put this into a config of your own.\n"
    )
    return (
        f"{own}"
        "# What differs for a backbone that MoCo trained: RGB, its own pixel statistics, torchvision's place of the strides,\n"
        "# every layer trained on, with BatchNorm synchronised (He et al. 2019, section 4.2). Copy it into your own config, and\n"
        f"# write the path of {WEIGHTS} as it is seen from where you start.\n"
        f"MODEL:\n  WEIGHTS: {WEIGHTS}\n{_pixels(backbone)}"
        f'  BACKBONE:\n    FREEZE_AT: 0\n  RESNETS:\n    DEPTH: {_depth(backbone)}\n    NORM: "SyncBN"\n    STRIDE_IN_1X1: False\n{narrow}'
        'INPUT:\n  FORMAT: "RGB"\nTEST:\n  PRECISE_BN:\n    ENABLED: True\n'
    )


def is_published(backbone: Backbone) -> bool:
    """Whether the published protocol is one of this backbone."""
    return backbone.name == "resnet50"


def published(backbone: Backbone, target: str) -> dict[str, str]:
    """The C4 configs by the name of their file, for a ResNet-50; none for others, which have no published one.

    `target` is the folder that holds them and the weights: a local one is written in as an absolute path.
    """
    if not is_published(backbone):
        return {}
    weights = WEIGHTS if "://" in target else (Path(target).absolute() / WEIGHTS).as_posix()
    return {name: _config(backbone, name, weights, protocol) for name, protocol in PUBLISHED.items()}


def _config(backbone: Backbone, name: str, weights: str, protocol: tuple[str, ...]) -> str:
    about, model, sizes, datasets, schedule = protocol
    quoted = '"' + weights.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return (
        f"{about}{_HOW.format(name=name)}"
        f'VERSION: 2\nMODEL:\n  META_ARCHITECTURE: "GeneralizedRCNN"\n  WEIGHTS: {quoted}\n{_pixels(backbone)}'
        "  BACKBONE:\n    FREEZE_AT: 0\n"
        f"  RESNETS:\n    DEPTH: {_depth(backbone)}\n"
        '    NORM: "naiveSyncBN"  # as released, where SyncBN is said to vary more from run to run\n'
        "    STRIDE_IN_1X1: False\n"
        "  RPN:\n    PRE_NMS_TOPK_TEST: 6000\n    POST_NMS_TOPK_TEST: 1000\n"
        f'{model}INPUT:\n  FORMAT: "RGB"\n{sizes}  MIN_SIZE_TEST: 800\n{datasets}'
        f"SOLVER:\n  IMS_PER_BATCH: 16\n  BASE_LR: 0.02\n{schedule}"
        "TEST:\n  PRECISE_BN:\n    ENABLED: True\n"
    )


def _pixels(backbone: Backbone) -> str:
    """Mean and standard deviation in 0..255, red, green, blue."""
    mean, std = (
        [round(255 * value, 3) for value in values]
        for values in (backbone.preprocessing.mean, backbone.preprocessing.std)
    )
    return f"  PIXEL_MEAN: {mean}\n  PIXEL_STD: {std}\n"


def _depth(backbone: Backbone) -> int:
    return int(backbone.name.removeprefix("resnet"))
