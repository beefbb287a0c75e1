"""The colour stage: uint8 crops to the encoder's input, batched, on whatever device the crops are on.

Responsible for colour jitter in each sample's own order, grayscale, blur, flip and normalisation, with
parameters drawn for each row from (seed, epoch, position, view). Not responsible for decoding and cropping
(decode.py) or for the numbers of a recipe. The operations are those of torchvision v2's float path
(torchvision 0.29, transforms/v2/functional/_color.py), and differ in one thing: the blur repeats the border, as the
released code's PIL blur does, where torchvision reflects it.

Nothing waits for the device: all draws are made on the host, which therefore knows the rows that an operation
needs. On the CPU a row's result is the same bits whatever shares the batch; on a GPU the mean of a contrast change
may be summed in another order, which moves the last bit.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moco_ray.data.draws import COLOUR, uniforms
from moco_ray.recipe import Augment

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)  # the order of augment.jitter
ORDERS = np.array(list(itertools.permutations(range(4))))  # 24,4
NEUTRAL = np.array([1.0, 1.0, 1.0, 0.0])  # the factors that change nothing
GRAY = (0.2989, 0.587, 0.114)  # ITU-R 601-2 luma as torchvision rounds it
COLOUR_DRAWS = 10
DTYPES = (torch.float16, torch.float32, torch.float64)  # bfloat16 keeps 8 bits: mean error 0.5/255


@dataclass(frozen=True)
class ColourParameters:
    """What was drawn for N rows; arrays on the host."""

    jitter: np.ndarray  # N bool: is the row jittered at all
    order: np.ndarray  # N,4 int: the jitter's operations, first to last
    factors: np.ndarray  # N,4 float64: brightness, contrast, saturation (1: as it was), hue (turns; 0: as it was)
    grayscale: np.ndarray  # N bool
    sigma: np.ndarray  # N float64: of the blur, in pixels; 0 where there is none
    flip: np.ndarray  # N bool: left to right


def colour_stage(
    crops: Tensor,
    positions: np.ndarray,
    view: int,
    seed: int,
    epoch: int,
    augment: Augment,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Augment and normalise one view: N,P,P,3 uint8 -> N,3,P,P of `dtype`, channels_last, on the crops' device.

    `positions` (N int64) are the rows' positions in the epoch. The order of operations is the released code's with
    `--aug-plus`, or without it where `augment.grayscale_first`
    (https://github.com/facebookresearch/moco/blob/3b42c2a12afd20da783501e87c3ea837c054397c/main_moco.py).
    Autocast is switched off inside: the blur would be convolved in bfloat16.
    Raises ValueError for crops or a dtype of another kind.
    """
    _check(crops, dtype)
    if len(positions) != len(crops):
        raise ValueError(f"{len(crops)} crops have {len(positions)} positions; give one position for each crop")
    parameters = draw_colour(positions, view, seed, epoch, augment)
    with torch.no_grad(), torch.autocast(crops.device.type, enabled=False):
        return _standardised(apply_colour(_unit(crops, dtype), parameters, augment), augment)


def normalise(crops: Tensor, augment: Augment, dtype: torch.dtype = torch.float32) -> Tensor:
    """The evaluation's colour stage: N,P,P,3 uint8 -> (x / 255 - mean) / std, N,3,P,P of `dtype`, channels_last.

    Raises ValueError for crops or a dtype of another kind.
    """
    _check(crops, dtype)
    return _standardised(_unit(crops, dtype), augment)


def draw_colour(positions: np.ndarray, view: int, seed: int, epoch: int, augment: Augment) -> ColourParameters:
    """Draw the parameters of the rows at `positions` (N int64). Factors are uniform in 1 ± strength, hue in
    ± strength, sigma in `augment.blur_sigma`, the order over the 24 orders, as in torchvision's ColorJitter."""
    u = uniforms(seed, epoch, positions, view, COLOUR, COLOUR_DRAWS)
    low, high = augment.blur_sigma
    return ColourParameters(
        jitter=u[:, 0] < augment.jitter_probability,
        order=ORDERS[(u[:, 1] * len(ORDERS)).astype(np.int64)],
        factors=NEUTRAL + np.array(augment.jitter) * (2.0 * u[:, 2:6] - 1.0),
        grayscale=u[:, 6] < augment.grayscale_probability,
        sigma=np.where(u[:, 7] < augment.blur_probability, low + (high - low) * u[:, 8], 0.0),
        flip=u[:, 9] < augment.flip_probability,
    )


def apply_colour(x: Tensor, parameters: ColourParameters, augment: Augment) -> Tensor:
    """Jitter, grayscale, blur and flip N,3,P,P in [0, 1]; the result is in [0, 1]. `x` is overwritten."""
    if augment.grayscale_first:
        x = _on_rows(x, parameters.grayscale, _to_gray)
    x = _jitter(x, parameters, [op for op in range(4) if augment.jitter[op] > 0.0])
    if not augment.grayscale_first:
        x = _on_rows(x, parameters.grayscale, _to_gray)
    blurred = parameters.sigma > 0.0
    weights = _gaussians(parameters.sigma[blurred], math.ceil(3.0 * augment.blur_sigma[1]))
    x = _on_rows(x, blurred, lambda rows: _blur(rows, _to_device(weights, rows)))
    return _on_rows(x, parameters.flip, lambda rows: rows.flip(-1))


def _jitter(x: Tensor, parameters: ColourParameters, ops: list[int]) -> Tensor:
    """Every row's `ops` (those with a strength) in the row's own order, one place in that order at a time."""
    if not ops or not parameters.jitter.any():
        return x
    order = parameters.order[np.isin(parameters.order, ops)].reshape(len(x), len(ops))
    blends = _to_device(_blends(parameters, order), x)  # places,3,N,1,1,1
    for place, (a, b, c) in enumerate(blends):
        gray = _gray(x)  # N,1,P,P
        # The mean of means: of one row alone, a single mean over P,P would be split among threads.
        shift = torch.addcmul(gray.mean(-1).mean(-1)[..., None, None] * c, gray, b)
        torch.addcmul(shift, x, a, out=x).clamp_(0.0, 1.0)
        turned = parameters.jitter & (order[:, place] == HUE)
        turns = parameters.factors[turned, HUE].reshape(-1, 1, 1)
        x = _on_rows(x, turned, lambda rows, turns=turns: _turn_hue(rows, _to_device(turns, rows)))
    return x


def _blends(parameters: ColourParameters, order: np.ndarray) -> np.ndarray:
    """places,3,N,1,1,1: a, b, c of clamp(a*x + b*gray + c*mean(gray)) for the operation of each row and place.

    Brightness scales; contrast blends with the mean of gray, saturation with gray itself. Hue is none of these:
    there, and in rows without jitter, a = 1 and b = c = 0 leave x as it is, to the bit.
    """
    factor = np.take_along_axis(parameters.factors, order, axis=1)  # N,places
    blends = (
        np.where(order == HUE, 1.0, factor),
        np.where(order == SATURATION, 1.0 - factor, 0.0),
        np.where(order == CONTRAST, 1.0 - factor, 0.0),
    )
    still = np.array([1.0, 0.0, 0.0])[:, None, None]
    return np.where(parameters.jitter[:, None], blends, still).transpose(2, 0, 1)[..., None, None, None]


def _turn_hue(x: Tensor, turns: Tensor) -> Tensor:
    """Turn the hue of n,3,P,P in HSV by `turns` (n,1,1, in whole turns) without building the HSV image.

    With v = max and c = max - min, the channel of offset o in (5, 3, 1) is v - c * clamp(min(k, 4 - k), 0, 1),
    where k = (o + 6 hue) mod 6 (https://en.wikipedia.org/wiki/HSL_and_HSV#HSV_to_RGB_alternative).
    """
    r, g, b = x.unbind(1)  # n,P,P each
    low, value = torch.aminmax(x, dim=1)
    chroma = value - low
    divisor = torch.where(chroma == 0, 1, chroma)  # a gray pixel has no hue, and stays as it is
    sixth = torch.where(value == g, 2 + (b - r) / divisor, 4 + (r - g) / divisor)
    sixth = torch.where(value == r, (g - b) / divisor, sixth) + 6 * turns
    turned = torch.empty_like(x)
    for channel, offset in enumerate((5, 3, 1)):
        k = (sixth + offset).remainder_(6)
        torch.sub(value, torch.minimum(k, 4 - k).clamp_(0, 1).mul_(chroma), out=turned[:, channel])
    return turned.clamp_(0.0, 1.0)


def _gray(x: Tensor) -> Tensor:
    """Luma of N,3,P,P: N,1,P,P."""
    return (x[:, 0:1] * GRAY[0]).add_(x[:, 1:2], alpha=GRAY[1]).add_(x[:, 2:3], alpha=GRAY[2])


def _to_gray(x: Tensor) -> Tensor:
    return _gray(x).expand(-1, 3, -1, -1)


def _gaussians(sigma: np.ndarray, radius: int) -> np.ndarray:
    """n,2*radius+1 float64: the weights of each row's blur, which sum to 1. Three sigmas hold 99.7 % of a Gaussian."""
    taps = np.arange(-radius, radius + 1)
    weights = np.exp(-0.5 * (taps / sigma[:, None]) ** 2)
    return weights / weights.sum(axis=1, keepdims=True)


def _blur(x: Tensor, weights: Tensor) -> Tensor:
    """Blur n,3,P,P, each row by its own `weights` (n,taps): along x, then along y, every plane a convolution group."""
    planes, taps = 3 * len(x), weights.shape[1]
    kernel, radius = weights.repeat_interleave(3, dim=0), taps // 2  # planes,taps
    y = x.reshape(1, planes, *x.shape[2:])
    y = F.pad(y, (radius, radius, 0, 0), mode="replicate")
    y = F.conv2d(y, kernel.view(planes, 1, 1, taps), groups=planes)
    y = F.pad(y, (0, 0, radius, radius), mode="replicate")
    y = F.conv2d(y, kernel.view(planes, 1, taps, 1), groups=planes)
    return y.view(x.shape).clamp_(0.0, 1.0)  # rounding may pass 1 by the last bit


def _on_rows(x: Tensor, chosen: np.ndarray, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Replace the chosen rows of x (N bool, on the host) by `change` of them; the others cost nothing."""
    rows = np.flatnonzero(chosen)
    if not len(rows):
        return x
    index = _to_device(rows, x, torch.int64)
    return x.index_copy_(0, index, change(x.index_select(0, index)))


def _unit(crops: Tensor, dtype: torch.dtype) -> Tensor:
    """N,P,P,3 uint8 -> N,3,P,P in [0, 1]; planes lie in one piece, for all that follows works plane by plane."""
    return crops.permute(0, 3, 1, 2).to(dtype, memory_format=torch.contiguous_format).div_(255)


def _standardised(x: Tensor, augment: Augment) -> Tensor:
    """(x - mean) / std of N,3,P,P, as channels_last. `x` is overwritten.

    Plane by plane and then turned: on a CPU that takes half as long as arithmetic on channels_last.
    """
    mean = _to_device(np.reshape(augment.mean, (3, 1, 1)), x)
    std = _to_device(np.reshape(augment.std, (3, 1, 1)), x)
    return x.sub_(mean).div_(std).contiguous(memory_format=torch.channels_last)


def _to_device(values: np.ndarray, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A small array as a tensor beside `like`, without waiting for the device: a copy from pageable memory would."""
    tensor = torch.from_numpy(np.ascontiguousarray(values)).to(dtype or like.dtype)
    return (tensor.pin_memory() if like.is_cuda else tensor).to(like.device, non_blocking=True)


def _check(crops: Tensor, dtype: torch.dtype) -> None:
    if crops.dtype != torch.uint8 or crops.ndim != 4 or crops.shape[3] != 3:
        raise ValueError(f"crops must be N,P,P,3 uint8, not {tuple(crops.shape)} {crops.dtype}")
    if dtype not in DTYPES:
        raise ValueError(
            f"the colour stage works in float16, float32 or float64, not in {dtype}: it keeps too few bits"
        )
