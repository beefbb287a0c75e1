"""The encoders: a torchvision ResNet with grouped BatchNorm, and MoCo's projection head.

The key encoder is a copy of the query encoder that follows it (momentum.py). Not here: training.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moco_ray import recipe
from moco_ray.errors import UserError
from moco_ray.method.batchnorm import GroupedBatchNorm2d
from moco_ray.method.small_maps import use_small_map_convolutions

if TYPE_CHECKING:
    from torchvision.models.resnet import ResNet

BACKBONES = {  # name: (torchvision's block, blocks of the four stages)
    "resnet10": ("BasicBlock", (1, 1, 1, 1)),
    "resnet18": ("BasicBlock", (2, 2, 2, 2)),
    "resnet34": ("BasicBlock", (3, 4, 6, 3)),
    "resnet50": ("Bottleneck", (3, 4, 6, 3)),
}
EXPANSION = {"BasicBlock": 1, "Bottleneck": 4}  # a block's output channels, in multiples of its width


class Encoder(nn.Module):
    """`head(backbone(x))`: N,3,P,P -> N,C, not yet normalised.

    `backbone` is torchvision's ResNet without its classifier (same state_dict keys) and gives N,D features:
    the product of a run. `head` is a linear layer in v1 (He et al. 2019) and a two-layer MLP in v2
    (Chen et al. 2020); it is thrown away after pre-training.
    """

    def __init__(self, settings: recipe.Encoder, group_rows: int):
        super().__init__()
        norm = functools.partial(GroupedBatchNorm2d, group_rows=group_rows)
        self.backbone = build_backbone(settings.backbone, settings.stem, norm)
        self.features = width_of(settings.backbone)  # D
        use_small_map_convolutions(self.backbone)
        self.head = _head(settings.head, self.features, settings.feature_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


def build_backbone(name: str, stem: str, norm_layer: Callable[[int], nn.Module] = nn.BatchNorm2d) -> "ResNet":
    """torchvision's ResNet without its classifier, N,3,P,P -> N,D, in training mode, with torchvision's initialisation."""
    # Here, for it is a second of imports, which the driver and Ray Train's controller need not wait for.
    from torchvision.models import resnet

    block, blocks = BACKBONES[name]
    backbone = resnet.ResNet(getattr(resnet, block), list(blocks), norm_layer=norm_layer)
    backbone.fc = nn.Identity()
    if stem != "imagenet":  # for small images: 3x3 and no pooling
        backbone.conv1 = nn.Conv2d(3, 64, 3, stride=1 if stem == "small_stride1" else 2, padding=1, bias=False)
        nn.init.kaiming_normal_(backbone.conv1.weight, mode="fan_out", nonlinearity="relu")
        backbone.maxpool = nn.Identity()
    return backbone


def width_of(name: str) -> int:
    """D, the length of a backbone's features."""
    return 512 * EXPANSION[BACKBONES[name][0]]


def _head(kind: str, features: int, feature_dim: int) -> nn.Module:
    last = nn.Linear(features, feature_dim)
    return last if kind == "linear" else nn.Sequential(nn.Linear(features, features), nn.ReLU(), last)


def build_encoder(settings: recipe.Encoder, group_rows: int, seed: int) -> Encoder:
    """A new encoder in training mode, initialised from `seed` alone (torchvision's initialisation).

    Weights are drawn in float32 whatever the precision, so that a proof in float64 starts where the
    float32 run does. No global random state is touched.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = Encoder(settings, group_rows)
    return encoder.to(torch.float64 if settings.precision == "float64" else torch.float32)


def autocast(settings: recipe.Encoder, device: torch.device):
    """Context of an encoder's forward pass: bfloat16 where the recipe says so, else nothing.

    Parameters, BatchNorm statistics, loss and keys stay in float32: in bfloat16 the momentum update is
    below half an ulp and the key encoder would freeze.
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bfloat16")


def working_dtype(settings: recipe.Encoder) -> torch.dtype:
    """The dtype of parameters, keys, queue and loss."""
    return torch.float64 if settings.precision == "float64" else torch.float32


def use_float32_of(settings: recipe.Encoder) -> None:
    """Let this process's GPU convolve float32 numbers as the recipe says. By itself torch takes TF32, which keeps 10 bits of the 23.

    Convolutions alone, the colour stage's blur among them (an error below 0.1 of 255 there); heads, loss and keys stay whole.
    On a CPU, and on GPUs before Ampere, tf32 is float32.
    """
    torch.backends.cudnn.conv.fp32_precision = "tf32" if settings.precision == "tf32" else "ieee"


def cpu_has_bfloat16() -> bool:
    """Whether this machine's CPU library computes convolutions in bfloat16 (on x86 it needs AVX-512)."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def refuse_emulated_precision(settings: recipe.Encoder, device: torch.device) -> None:
    """Raise UserError for bfloat16 on a CPU that would emulate it: measured on AVX2, 11 times float32's time a step."""
    if settings.precision == "bfloat16" and device.type == "cpu" and not cpu_has_bfloat16():
        raise UserError(
            "encoder.precision bfloat16 would be emulated by this CPU, at many times the cost of float32; give "
            "encoder.precision=float32"
        )
