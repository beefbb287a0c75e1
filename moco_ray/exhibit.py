"""What a rank takes down of a step so that it can be looked at: views, hardest negatives, how similarities are spread.

Read from the step's own tensors, before the queue takes the step's keys; changes nothing and calls no other rank. It waits for
the device, so it is for some steps only. Not responsible for images of negatives, which the driver fetches (pictures.py), nor
for the dictionary's scalars.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moco_ray.data.augment import colour_stage
from moco_ray.data.batch import Batch
from moco_ray.method.queue import Queue
from moco_ray.plan import Plan

VIEWS, QUERIES, NEGATIVES = 12, 6, 5  # rows whose two views are shown; of them, those with their hardest negatives; so many of these
SPREAD_QUERIES = 32  # whose similarities to all negatives are counted
BUCKETS = 80  # of -1..1
THUMB_PIXELS = 96


class Step(NamedTuple):
    """One rank's part of a step. N own rows, B rows of all ranks, C features, K queued keys."""

    batch: Batch
    queries: Tensor  # at least N,C: of the first direction, row by row
    keys: Tensor  # B,C: their keys in row order
    own: range  # the rank's rows of the batch
    queue: Queue  # before it takes these keys


def exhibit(step: Step, plan: Plan) -> dict[str, Any] | None:
    """What is sent to the driver: numbers and small arrays. None if a feature is not finite: the step will be refused.

    `views` V,2,T,T,3 uint8 after the colour stage, denormalised; of the first Q of these rows `rows` (Q,) of the manifest, `positive` (Q,)
    similarity to their own keys, `slots`, `made` (the step that made the key, -1 for noise) and `similarity` (Q,k) of the hardest queued
    negatives; `position` and `newest` say how the ring lies (data/whereabouts.py); `histograms` by name.
    """
    batch, queue = step.batch, step.queue
    q, k = step.queries[: len(batch.crops)].detach(), step.keys[step.own.start : step.own.stop]
    if not bool(torch.isfinite(q).all() & torch.isfinite(step.keys).all()):
        return None
    positive = (q * k).sum(1)  # N
    some = q[:SPREAD_QUERIES]
    queued = some @ queue.keys.T  # n,K
    others = some @ step.keys.T  # n,B
    mates = torch.ones_like(others, dtype=torch.bool)
    mates[torch.arange(len(some)), step.own.start + torch.arange(len(some))] = False  # its own key is no negative
    filled = queued[:, queue.steps >= 0]
    hardest = queued[:QUERIES].topk(min(NEGATIVES, len(queue)), dim=1)
    made = queue.steps[hardest.indices]
    spread = {"positive": positive, "step_negative": others[mates], "queued_negative": filled}
    return {
        "views": _views(batch, plan),
        "rows": batch.rows[:QUERIES].cpu().numpy(),
        "positive": positive[:QUERIES].float().cpu().numpy(),
        "slots": hardest.indices.cpu().numpy(),
        "made": made.cpu().numpy(),
        "similarity": hardest.values.float().cpu().numpy(),
        "position": queue.position,
        "newest": int(queue.steps[queue.position - 1]),
        "histograms": {name: histogram(values) for name, values in spread.items() if values.numel()},
    }


def histogram(similarities: Tensor) -> dict[str, Any]:
    """Any number of values in -1..1 -> what SummaryWriter.add_histogram_raw takes, counted on their device."""
    values = similarities.double().clamp(-1, 1).flatten()
    counts = torch.histc(values, BUCKETS, -1, 1)
    sums = torch.stack([values.min(), values.max(), values.sum(), values.square().sum()]).tolist()
    return {
        "min": sums[0], "max": sums[1], "num": values.numel(), "sum": sums[2], "sum_squares": sums[3],
        "bucket_limits": np.linspace(-1, 1, BUCKETS + 1)[1:].tolist(), "bucket_counts": counts.tolist(),
    }  # fmt: skip


def _views(batch: Batch, plan: Plan) -> np.ndarray:
    """The two views of the first rows as the encoders see them, V,2,T,T,3 uint8: drawn by position, so drawn alike once more."""
    augment, positions = plan.recipe.augment, batch.positions[:VIEWS].cpu().numpy()
    shown = []
    for view in (0, 1):
        x = colour_stage(batch.crops[:VIEWS, view], positions, view, plan.recipe.run.seed, batch.epoch, augment)  # V,3,P,P
        mean, std = (x.new_tensor(values)[:, None, None] for values in (augment.mean, augment.std))
        x = x * std + mean
        if augment.image_pixels > THUMB_PIXELS:
            x = F.interpolate(x, size=(THUMB_PIXELS, THUMB_PIXELS), mode="bilinear", antialias=True)
        shown.append((x * 255 + 0.5).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1))
    return torch.stack(shown, 1).cpu().numpy()
