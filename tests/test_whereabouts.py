"""The image that each key of the queue was made of, against a queue that carries the rows along."""

import time
from functools import lru_cache

import numpy as np
import pytest
import torch

from moco_ray.data.order import EpochOrder
from moco_ray.data.whereabouts import UNKNOWN, rows_of_slots
from moco_ray.method.queue import Queue
from moco_ray.plan import Plan
from moco_ray.recipe import Recipe

CHUNKS = np.array([7, 61, 0, 13, 40, 29], np.int64)  # 150 rows


def plan_of(queue_keys: int, symmetric: bool = False, batch: int = 16, group: int = 4) -> Plan:
    recipe = {
        "schedule": {"steps": 40},
        "batch": {"global_batch_size": batch, "bn_group_size": group},
        "contrast": {"queue_keys": queue_keys, "symmetric": symmetric},
    }
    return Plan(Recipe.parse(recipe), int(CHUNKS.sum()))


def orders(plan: Plan):
    return lru_cache(lambda epoch: EpochOrder(CHUNKS, plan, 3, epoch))


def fill(queue: Queue, plan: Plan, steps: range) -> None:
    """Enqueue as the loop does, but keys that say of which row they are."""
    order = orders(plan)
    for step in steps:
        epoch, within = divmod(step, plan.steps_per_epoch)
        rows = np.concatenate([order(epoch).rows_of(within, group) for group in range(plan.groups)])
        keys = torch.from_numpy(np.stack([rows, rows], 1)).double()
        queue.enqueue(torch.cat([keys] * (plan.keys_per_step // len(keys))), step)


def found_and_right(queue: Queue, plan: Plan, **more) -> tuple[np.ndarray, np.ndarray]:
    found = rows_of_slots(queue.steps.numpy(), queue.position, plan, orders(plan), **more)
    return found, np.where(queue.steps.numpy() >= 0, queue.keys[:, 0].numpy(), UNKNOWN)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("queue_keys", [8, 16, 50, 64, 100, 333])
def test_the_row_of_each_slot_is_the_one_that_was_enqueued_there(queue_keys, symmetric):
    """Queues smaller than a batch, and not a multiple of it; before they are full and after many turns, over five epochs."""
    plan = plan_of(queue_keys, symmetric)
    queue = Queue(queue_keys, 2, 0, dtype=torch.float64)
    assert plan.steps_per_epoch == 9
    for step in range(plan.total_steps):
        found, right = found_and_right(queue, plan)
        assert (found == right).all(), step
        assert (found == UNKNOWN).sum() == max(0, queue_keys - step * plan.keys_per_step)
        fill(queue, plan, range(step, step + 1))


def test_a_queue_from_a_checkpoint_knows_its_rows_and_some_slots_may_be_asked_for():
    plan = plan_of(50)
    before, after = Queue(50, 2, 0, dtype=torch.float64), Queue(50, 2, 1, dtype=torch.float64)
    fill(before, plan, range(11))
    after.load_state_dict(before.state_dict())
    fill(after, plan, range(11, 14))
    found, right = found_and_right(after, plan)
    assert (found == right).all()
    slots = np.array([49, 3, 3, 17])
    assert found_and_right(after, plan, slots=slots)[0].tolist() == right[slots].tolist()
    assert found_and_right(after, plan, slots=np.array([], int))[0].tolist() == []


def test_keys_of_before_the_run_was_ours_have_no_row():
    """A run that carries on one of the released code: its steps are known, its order is not."""
    plan = plan_of(50)
    queue = Queue(50, 2, 0, dtype=torch.float64)
    fill(queue, plan, range(11))
    found, right = found_and_right(queue, plan, first_step=9)
    assert (found == np.where(queue.steps.numpy() >= 9, right, UNKNOWN)).all() and (found != UNKNOWN).sum() == 32


def test_all_slots_of_a_queue_of_65536_are_found_in_well_under_a_second():
    chunks = np.full(2000, 128)
    recipe = Recipe.parse({"schedule": {"epochs": 2}})
    plan = Plan(recipe, int(chunks.sum()))
    order = EpochOrder(chunks, plan, 0, 0)
    steps = np.repeat(np.arange(300, 556), 256)
    began = time.process_time()
    rows = rows_of_slots(steps, 0, plan, lambda epoch: order)
    assert time.process_time() - began < 0.25  # about 10 ms of one core
    assert len(set(rows.tolist())) == 65536
