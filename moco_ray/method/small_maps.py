"""A convolution that is a matrix product where the feature map is small, on a CPU.

There the CPU library's convolution takes many times what the numbers need, and small images end in such maps. Library / here,
milliseconds of one AVX-512 core (AMD EPYC) for 32 rows, forward and backward: 512 to 512 channels, 3x3, on a 2x2 map 22 / 20 in float32, 29 / 15
in channels_last, 16 / 8 in channels_last and bfloat16; 256 to 256 on 4x4 in the last 6.0 / 6.2 (7.0 / 4.1 on a Xeon), but 12 / 31 in float32, where it
stays with the library. Same numbers up to the order of sums; state_dict keys are `nn.Conv2d`'s. On other devices and on larger maps this is
`nn.Conv2d`.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moco_ray.method.products import product

LARGEST_MAP_PIXELS = 4  # of the output; above, the library is as fast or faster
LARGEST_REDUCED_MAP_PIXELS = 16  # in reduced precision and channels_last


class SmallMapConv2d(nn.Conv2d):
    """`nn.Conv2d` with a square kernel, zero padding, no bias, no groups and no dilation."""

    @classmethod
    def like(cls, conv: nn.Conv2d) -> "SmallMapConv2d":
        """The same layer, sharing its weight."""
        layer = cls(conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, conv.padding, bias=False)
        layer.weight = conv.weight
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """N,C,H,W -> N,O,H',W'."""
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return super().forward(x)
        reduced = torch.is_autocast_enabled("cpu")
        last = all(one.is_contiguous(memory_format=torch.channels_last) for one in (x, self.weight))
        pixels = (x.shape[2] // self.stride[0]) * (x.shape[3] // self.stride[1])
        if pixels > (LARGEST_REDUCED_MAP_PIXELS if reduced and last else LARGEST_MAP_PIXELS):
            return super().forward(x)
        weight = self.weight
        if reduced:  # as autocast does for nn.Conv2d
            x, weight = (one.to(torch.get_autocast_dtype("cpu")) for one in (x, weight))
        return _SmallMapConvolution.apply(x, weight, self.stride[0], self.padding[0], last)


class _SmallMapConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, stride, padding, last):
        ctx.save_for_backward(x, weight)
        ctx.geometry = (stride, padding, last)
        height, width = ((size + 2 * padding - weight.shape[2]) // stride + 1 for size in x.shape[2:])
        y = product(_patches(x, weight.shape[2], stride, padding, last), _matrix(weight, last))  # N*pixels,O
        y = y.view(len(x), height, width, -1).permute(0, 3, 1, 2)
        return y if last else y.contiguous()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        stride, padding, last = ctx.geometry
        rows = gradient.permute(0, 2, 3, 1).reshape(-1, len(weight))  # N*pixels,O
        to_x = to_weight = None
        if ctx.needs_input_grad[0]:
            columns = product(rows, _matrix(weight, last).T)
            to_x = _put_back(columns, x.shape, gradient.shape[2:], (weight.shape[2], stride, padding), last)
        if ctx.needs_input_grad[1]:
            to_weight = product(rows.T, _patches(x, weight.shape[2], stride, padding, last).T)
            if last:
                to_weight = to_weight.view(len(weight), *weight.shape[2:], -1).permute(0, 3, 1, 2)
            to_weight = to_weight.view_as(weight)
        return to_x, to_weight, None, None, None


def _matrix(weight: Tensor, last: bool) -> Tensor:
    """O,C,k,k as a matrix with O rows, in the order in which it lies in memory."""
    return (weight.permute(0, 2, 3, 1) if last else weight).reshape(len(weight), -1)


def _patches(x: Tensor, kernel: int, stride: int, padding: int, last: bool) -> Tensor:
    """What each output pixel sees, N*pixels rows, in the order of `_matrix`."""
    if not last:
        return F.unfold(x, kernel, padding=padding, stride=stride).transpose(1, 2).flatten(0, 1)
    x = F.pad(x.permute(0, 2, 3, 1), (0, 0, padding, padding, padding, padding))  # N,H,W,C
    seen = x.unfold(1, kernel, stride).unfold(2, kernel, stride)  # N,H',W',C,k,k
    return seen.permute(0, 1, 2, 4, 5, 3).reshape(-1, kernel * kernel * x.shape[3])


def _put_back(columns: Tensor, shape: torch.Size, pixels: torch.Size, geometry: tuple[int, int, int], last: bool) -> Tensor:
    """The sum of all patches at the places they were taken from, in float32 at least: N,C,H,W; geometry = (kernel, stride, padding)."""
    (count, channels, height, width), (kernel, stride, padding), given = shape, geometry, columns.dtype
    columns = columns.to(torch.promote_types(given, torch.float32))
    if not last:
        columns = columns.view(count, pixels.numel(), -1).transpose(1, 2)
        return F.fold(columns, (height, width), kernel, padding=padding, stride=stride).to(given)
    columns = columns.view(count, *pixels, kernel, kernel, channels)
    whole = columns.new_zeros(count, height + 2 * padding, width + 2 * padding, channels)
    for row in range(kernel):
        for column in range(kernel):
            places = (slice(at, at + stride * (size - 1) + 1, stride) for at, size in zip((row, column), pixels, strict=True))
            whole[:, *places] += columns[:, :, :, row, column]
    return whole[:, padding : padding + height, padding : padding + width].permute(0, 3, 1, 2).to(given)


def use_small_map_convolutions(module: nn.Module) -> None:
    """Replace every plain 3x3 and 1x1 convolution inside `module`, in place; weights stay the same parameters."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Conv2d and child.kernel_size in ((3, 3), (1, 1)) and child.bias is None:
                if child.groups == 1 and child.dilation == (1, 1):
                    setattr(parent, name, SmallMapConv2d.like(child))
