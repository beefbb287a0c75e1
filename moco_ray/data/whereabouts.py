"""Where the keys of the queue come from: the row of the manifest that each slot's key was made of.

Pure arithmetic over the queue's steps, the plan and the order of the epochs: nothing is stored with the keys, and nothing is
read. Not responsible for the queue (method/queue.py), nor for the order (order.py).
"""

from collections.abc import Callable

import numpy as np

from moco_ray.data.order import EpochOrder
from moco_ray.plan import Plan

UNKNOWN = -1  # the row of a slot whose key is of no image that we know


def rows_of_slots(
    queue_steps: np.ndarray,
    position: int,
    plan: Plan,
    order: Callable[[int], EpochOrder],
    slots: np.ndarray | None = None,
    first_step: int = 0,
) -> np.ndarray:
    """(N,) int64 manifest row of the key in each of `slots` (N,) int64, or of all K; UNKNOWN where there is none.

    `queue_steps` (K,) int64 is the step that made each key (method/queue.py's `steps`) and `position` the slot that the next key
    goes to; `order(epoch)` is the order of an epoch. The slot before `position` holds the last key of the newest step, the one
    before that the key before it, and so round the ring: `plan.keys_per_step` of each step, row by row of the batch, in the
    symmetric form one direction after the other. A slot whose step is not what this says (no key has filled it) is UNKNOWN, and so is
    one of a step before `first_step`: a run that carries on one of the released code was not in our order before.

    An image that could not be read had its place taken by another of its window (segment.py): its row is told all the same.
    Costs a permutation for each window and BN group in the queue: milliseconds for K = 65536.
    """
    size, per_step = len(queue_steps), plan.keys_per_step
    slots = np.arange(size) if slots is None else np.asarray(slots, np.int64)
    age = (position - 1 - slots) % size  # in keys: 0 is the newest
    step = int(queue_steps[position - 1]) - age // per_step
    known = (queue_steps[slots] == step) & (step >= first_step)
    rows = np.full(len(slots), UNKNOWN, np.int64)
    epoch, step_in_epoch = np.divmod(step[known], plan.steps_per_epoch)
    row_of_batch = (per_step - 1 - age[known] % per_step) % plan.recipe.batch.global_batch_size
    rows[known] = rows_at(epoch, step_in_epoch, row_of_batch, plan, order)
    return rows


def rows_at(
    epoch: np.ndarray, step_in_epoch: np.ndarray, row_of_batch: np.ndarray, plan: Plan, order: Callable[[int], EpochOrder]
) -> np.ndarray:
    """(N,) int64 manifest rows that stood at these places (each (N,) int64; `row_of_batch` 0 .. B-1)."""
    group, place = np.divmod(row_of_batch, plan.recipe.batch.bn_group_size)
    window, step_in_window = np.divmod(step_in_epoch, plan.window_steps)
    windows = -(-plan.steps_per_epoch // plan.window_steps)
    place = step_in_window * plan.recipe.batch.bn_group_size + place  # in the window's rows
    which = (epoch * windows + window) * plan.groups + group
    by_window = np.argsort(which, kind="stable")
    cuts = np.flatnonzero(np.diff(which[by_window], prepend=-1))
    rows = np.empty(len(which), np.int64)
    for part in np.split(by_window, cuts[1:]) if len(which) else []:
        first = part[0]
        rows[part] = order(int(epoch[first])).window_rows(int(group[first]), int(window[first]))[place[part]]
    return rows
