"""A convolution whose weight gradient is one matrix product where the feature map is small, on a CPU.

For 3x3 kernels over maps of up to four pixels, the CPU library's weight gradient takes many times the forward pass,
and small images end in such maps. The whole backward of one layer, library / here, measured on two busy AVX2 cores in
float32 with 256 rows: 512 to 512 channels on a 1x1 map 151 / 22 ms, on 2x2 225 / 89 ms, 256 to 512 to 1x1 68 / 18 ms;
at 4x4 it would be slower, 76 / 154 ms. Same numbers up to the order of sums; state_dict keys are `nn.Conv2d`'s. On other devices, on
larger maps and in reduced precision this is `nn.Conv2d`.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LARGEST_MAP_PIXELS = 4  # of the output; above, the library is as fast or faster


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
        pixels = (x.shape[2] // self.stride[0]) * (x.shape[3] // self.stride[1])
        plain = x.device.type != "cpu" or torch.is_autocast_enabled("cpu") or pixels > LARGEST_MAP_PIXELS
        if plain or not (torch.is_grad_enabled() and self.weight.requires_grad):
            return super().forward(x)
        return _SmallMapConvolution.apply(x, self.weight, self.stride, self.padding)


class _SmallMapConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, stride, padding):
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding = stride, padding
        return F.conv2d(x, weight, None, stride, padding)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        geometry = (list(ctx.stride), list(ctx.padding), [1, 1], False, [0, 0], 1)
        to_x = None
        if ctx.needs_input_grad[0]:
            to_x = torch.ops.aten.convolution_backward(gradient, x, weight, None, *geometry, [True, False, False])[0]
        patches = F.unfold(x, weight.shape[2:], padding=ctx.padding, stride=ctx.stride)  # N,C*9,pixels
        patches = patches.transpose(1, 2).flatten(0, 1)  # N*pixels,C*9
        rows = gradient.permute(0, 2, 3, 1).reshape(len(patches), -1)  # N*pixels,O
        return to_x, (rows.T @ patches).view_as(weight), None, None


def use_small_map_convolutions(module: nn.Module) -> None:
    """Replace every plain 3x3 convolution inside `module`, in place; weights stay the same parameters."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Conv2d and child.kernel_size == (3, 3) and child.bias is None:
                if child.groups == 1 and child.dilation == (1, 1):
                    setattr(parent, name, SmallMapConv2d.like(child))
