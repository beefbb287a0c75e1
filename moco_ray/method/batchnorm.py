"""Grouped BatchNorm: each run of `group_rows` rows is normalised by its own statistics.

BatchNorm is the only layer whose output depends on who shares a forward pass. Here the recipe names
the sharing, so that any number of ranks, and any split of a rank's rows into passes, computes the same.
Not here: which rows form a group (plan.py) and the shuffle that keeps groups from leaking (shuffle.py).
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moco_ray.ranks import Ranks


class GroupedBatchNorm2d(nn.BatchNorm2d):
    """`nn.BatchNorm2d` over groups of consecutive rows; the same state_dict keys.

    In training, running statistics do not move in forward. The statistics of each group are summed,
    and `commit_statistics` takes one step of the moving average with their mean, once a step: the
    average over groups, however many passes and ranks they were spread over, because a moving average
    is linear. Evaluation mode is `nn.BatchNorm2d`'s.
    """

    def __init__(self, features: int, group_rows: int):
        super().__init__(features)
        self.group_rows = group_rows
        # Zero between steps, so not part of the state. All on the device: a compiled encoder would be compiled anew for a number.
        self.register_buffer("sums", torch.zeros(2, features), persistent=False)  # 2,C: of means, of variances (unbiased)
        self.register_buffer("groups_seen", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """N,C,H,W -> N,C,H,W. In training N must be a multiple of `group_rows`."""
        if not self.training:
            return super().forward(x)
        assert len(x) % self.group_rows == 0, (len(x), self.group_rows)
        groups = len(x) // self.group_rows
        statistics = torch.zeros(2, groups, x.shape[1], dtype=self.sums.dtype, device=x.device)
        if groups > 1 and x.device.type == "cpu" and not torch.compiler.is_compiling():
            normalised = _InPlace.apply(x, self.weight, self.bias, statistics, self.eps)
        else:
            normalised = self._group_by_group(x, statistics)
        self.sums += statistics.sum(1)
        self.groups_seen += groups
        return normalised

    def _group_by_group(self, x: Tensor, statistics: Tensor) -> Tensor:
        """The plain formula. A moving average with momentum 1 is the group's own statistics."""
        parts = x.split(self.group_rows)
        normalised = [
            F.batch_norm(rows, mean, var, self.weight, self.bias, True, 1.0, self.eps)
            for rows, mean, var in zip(parts, *statistics, strict=True)
        ]
        return torch.cat(normalised) if len(normalised) > 1 else normalised[0]


class _InPlace(torch.autograd.Function):
    """`_group_by_group`, where each group is written to its place: no pass to put them together, which costs a third of the forward."""

    @staticmethod
    def forward(ctx, x, weight, bias, statistics, eps):
        groups = statistics.shape[1]
        normalised, saved = torch.empty_like(x), torch.empty_like(statistics)  # means and 1/sqrt(var + eps), for backward
        for rows, out, found, kept in zip(x.chunk(groups), normalised.chunk(groups), statistics.unbind(1), saved.unbind(1), strict=True):
            torch.ops.aten.native_batch_norm.out(
                rows, weight, bias, *found, True, 1.0, eps, out=out, save_mean=kept[0], save_invstd=kept[1]
            )
        ctx.save_for_backward(x, weight, saved)
        ctx.eps = eps
        return normalised

    @staticmethod
    def backward(ctx, gradient):
        x, weight, saved = ctx.saved_tensors
        groups, needed = saved.shape[1], list(ctx.needs_input_grad[:3])
        found = [
            torch.ops.aten.native_batch_norm_backward(part, rows, weight, None, None, *kept, True, ctx.eps, needed)
            for part, rows, kept in zip(gradient.chunk(groups), x.chunk(groups), saved.unbind(1), strict=True)
        ]
        parts = zip(*found, strict=True)  # of the gradients to x, weight and bias
        joined = (join(part) if asked else None for join, part, asked in zip((torch.cat, sum, sum), parts, needed, strict=True))
        return *joined, None, None


def layers(module: nn.Module) -> Iterator[GroupedBatchNorm2d]:
    """The grouped BatchNorm layers of a module, in its order."""
    return (m for m in module.modules() if isinstance(m, GroupedBatchNorm2d))


@torch.no_grad()
def commit_statistics(module: nn.Module, healthy: Tensor) -> None:
    """One step of all moving averages if `healthy` (a bool on the device), then forget the sums.

    A layer that saw no group stays as it is. All layers at once: one by one they would be a thousand launches on a GPU.
    """
    held = list(layers(module))
    if not held:
        return
    running = [buffer for layer in held for buffer in (layer.running_mean, layer.running_var)]
    now, sums = torch.cat(running), torch.cat([layer.sums.flatten() for layer in held])
    seen = torch.cat([layer.groups_seen.expand(layer.sums.numel()) for layer in held])
    momentum = held[0].momentum
    assert all(layer.momentum == momentum for layer in held)
    moved = torch.lerp(now, sums / seen.clamp(min=1), momentum)
    moved = torch.where(healthy & (seen > 0), moved, now)
    torch._foreach_copy_(running, list(moved.split([len(buffer) for buffer in running])))
    taken = (healthy & (torch.stack([layer.groups_seen for layer in held]) > 0)).long()
    torch._foreach_add_([layer.num_batches_tracked for layer in held], list(taken.unbind()))
    forget_statistics(module)


def forget_statistics(module: nn.Module) -> None:
    """Drop what forward summed up since the last commit: after a pass that is not part of the run, for one."""
    held = [buffer for layer in layers(module) for buffer in (layer.sums, layer.groups_seen)]
    if held:
        torch._foreach_zero_(held)


@torch.no_grad()
def average_statistics(module: nn.Module, ranks: Ranks, share: float) -> None:
    """Replace each rank's running statistics by their mean over ranks, weighted with `share`.

    `share` is the rank's own groups over all groups. The average is written back on purpose: a run that
    goes on after a checkpoint and one that is restored from it then continue from the same bits.
    """
    if ranks.world == 1:
        return
    buffers = [b for layer in layers(module) for b in (layer.running_mean, layer.running_var)]
    average = ranks.sum(torch.cat(buffers) * share)
    for buffer, values in zip(buffers, average.split([len(b) for b in buffers]), strict=True):
        buffer.copy_(values)
