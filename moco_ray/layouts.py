"""What others call the same tensors: the names of a ResNet in the layouts of other libraries, and where they lie in others' files.

Pure renaming, from or to torchvision's names (`layer1.0.conv1.weight`). Sources: the libraries' own models and their
documented converters, named at each. Not here: files (export.py) and recognising them (foreign.py).
"""

import re
from collections.abc import Callable
from typing import NamedTuple

Rename = Callable[[str], str]

# transformers/models/resnet/modeling_resnet.py
_TRANSFORMERS = [
    (r"^conv1\.", "embedder.embedder.convolution."),
    (r"^bn1\.", "embedder.embedder.normalization."),
    (r"^layer(\d)\.(\d+)\.conv(\d)\.", lambda m: f"encoder.stages.{int(m[1]) - 1}.layers.{m[2]}.layer.{int(m[3]) - 1}.convolution."),
    (r"^layer(\d)\.(\d+)\.bn(\d)\.", lambda m: f"encoder.stages.{int(m[1]) - 1}.layers.{m[2]}.layer.{int(m[3]) - 1}.normalization."),
    (r"^layer(\d)\.(\d+)\.downsample\.0\.", lambda m: f"encoder.stages.{int(m[1]) - 1}.layers.{m[2]}.shortcut.convolution."),
    (r"^layer(\d)\.(\d+)\.downsample\.1\.", lambda m: f"encoder.stages.{int(m[1]) - 1}.layers.{m[2]}.shortcut.normalization."),
]  # fmt: skip

# The released MoCo's detection/convert-pretrain-to-detectron2.py; detectron2/modeling/backbone/resnet.py
_DETECTRON2 = [
    (r"^(conv1|bn1)\.", r"stem.\1."),
    (r"^layer(\d)\.", lambda m: f"res{int(m[1]) + 1}."),
    (r"\bbn(\d)\.", r"conv\1.norm."),
    (r"\bdownsample\.0\.", "shortcut."),
    (r"\bdownsample\.1\.", "shortcut.norm."),
]

# nn.Sequential(*list(resnet.children())[:-1]), as lightly's examples make it: the places of torchvision's children
_CHILDREN = {"0": "conv1", "1": "bn1", "4": "layer1", "5": "layer2", "6": "layer3", "7": "layer4"}
# The same of lightly's own ResNetGenerator, as in its tutorials: no pooling, ReLU as a function (lightly/models/resnet.py)
_GENERATED = {"0": "conv1", "1": "bn1", "2": "layer1", "3": "layer2", "4": "layer3", "5": "layer4"}


def _renamed(rules: list) -> Rename:
    def rename(name: str) -> str:
        for pattern, new in rules:
            name = re.sub(pattern, new, name)
        return name

    return rename


transformers_name = _renamed(_TRANSFORMERS)
detectron2_name = _renamed(_DETECTRON2)


def name_of_child(name: str) -> str:
    """4.0.conv1.weight -> layer1.0.conv1.weight."""
    first, _, rest = name.partition(".")
    return f"{_CHILDREN[first]}.{rest}" if first in _CHILDREN else f"children.{name}"  # no name of torchvision's


def same_name(name: str) -> str:
    return name


def name_of_generated(name: str) -> str:
    """2.0.shortcut.0.weight -> layer1.0.downsample.0.weight."""
    first, _, rest = name.partition(".")
    if first not in _GENERATED:
        return f"children.{name}"
    return f"{_GENERATED[first]}.{rest.replace('.shortcut.', '.downsample.')}"


class Layout(NamedTuple):
    """Where a file of somebody else's trainer holds the backbone that learned by gradient."""

    tool: str
    containers: tuple[tuple[str, ...], ...]  # keys that lead to the dictionary of tensors; () is the file itself
    prefix: str
    rename: Rename = same_name  # of what follows the prefix, to torchvision's
    marks: tuple[str, ...] = ()  # beginnings of other names, one of which must be there


SOLO_LEARN = "solo-learn"
_STATE = (("state_dict",), ("model",), ())

# The more particular first. Sources: the trainers' own modules; their attributes are the prefixes.
LAYOUTS = (
    Layout("the released MoCo", _STATE, "module.encoder_q."),  # moco/builder.py under DistributedDataParallel
    Layout("the released MoCo, without DistributedDataParallel", _STATE, "encoder_q."),
    Layout("VISSL", (("classy_state_dict", "base_model", "model", "trunk"),), "_feature_blocks."),  # models/trunks/resnext.py
    Layout("OpenSelfSup", _STATE, "encoder_q.0."),  # models/moco.py: Sequential(backbone, neck)
    Layout("lightly, its ImageNet recipe", _STATE, "query_backbone."),  # `backbone` is the slow copy there
    Layout("lightly, its ImageNet recipe", _STATE, "student_backbone."),  # of DINO: the same
    Layout("lightly, its tutorials", _STATE, "backbone.", name_of_generated, marks=("backbone.2.0.",)),
    Layout("lightly, its tutorials", _STATE, "resnet_moco.backbone.", name_of_generated),
    Layout("lightly, its examples", _STATE, "backbone.", name_of_child),
    Layout(SOLO_LEARN, _STATE, "backbone.", marks=("momentum_backbone.", "projector.")),  # solo/methods/base.py
    Layout(SOLO_LEARN, _STATE, "encoder.", marks=("momentum_encoder.", "projector.")),  # its first releases
    Layout("MMSelfSup or MMPretrain", _STATE, "backbone.", marks=("neck.", "encoder_k.", "head.")),
    Layout("a trainer that calls it `backbone`", _STATE, "backbone."),
    Layout("torchvision or timm, under DistributedDataParallel", _STATE, "module."),
    Layout("torchvision or timm", _STATE, ""),
)
