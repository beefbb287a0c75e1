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
        self.groups_seen = 0
        for name in ("mean_sum", "var_sum"):  # C float; zero between steps, so not part of the state
            self.register_buffer(name, torch.zeros(features), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """N,C,H,W -> N,C,H,W. In training N must be a multiple of `group_rows`."""
        if not self.training:
            return super().forward(x)
        assert len(x) % self.group_rows == 0, (len(x), self.group_rows)
        normalised = []
        for rows in x.split(self.group_rows):
            mean, var = torch.zeros_like(self.mean_sum), torch.zeros_like(self.var_sum)
            # A moving average with momentum 1 is this group's own statistics (variance unbiased).
            normalised.append(F.batch_norm(rows, mean, var, self.weight, self.bias, True, 1.0, self.eps))
            self.mean_sum += mean
            self.var_sum += var
            self.groups_seen += 1
        return torch.cat(normalised) if len(normalised) > 1 else normalised[0]

    @torch.no_grad()
    def commit(self, healthy: Tensor) -> None:
        """One step of the moving average if `healthy` (a bool on the device), then forget the sums."""
        if self.groups_seen:
            for running, total in ((self.running_mean, self.mean_sum), (self.running_var, self.var_sum)):
                moved = torch.lerp(running, total / self.groups_seen, self.momentum)
                running.copy_(torch.where(healthy, moved, running))
            self.num_batches_tracked += healthy
        self.forget()

    def forget(self) -> None:
        """Drop what forward summed up since the last commit."""
        self.mean_sum.zero_()
        self.var_sum.zero_()
        self.groups_seen = 0


def layers(module: nn.Module) -> Iterator[GroupedBatchNorm2d]:
    """The grouped BatchNorm layers of a module, in its order."""
    return (m for m in module.modules() if isinstance(m, GroupedBatchNorm2d))


def commit_statistics(module: nn.Module, healthy: Tensor) -> None:
    """`commit` of every layer."""
    for layer in layers(module):
        layer.commit(healthy)


def forget_statistics(module: nn.Module) -> None:
    """`forget` of every layer: after a pass that is not part of the run."""
    for layer in layers(module):
        layer.forget()


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
