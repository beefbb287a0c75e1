"""The leak probe: which keys move when one image of a batch is altered, with the shuffle and without it."""

import contextlib
from unittest import mock

import pytest
import torch

from moco_ray.leak_probe import Leak, probe_leak
from moco_ray.ranks import Ranks
from tests.synthetic import batches, flat, plan, recipe, small_learner

STEP = 3


def probed(ranks: Ranks, changes: dict, row: int, identity: bool = False) -> tuple[Leak, bool]:
    """The probe on a rank's rows, and whether encoder and batch are as before."""
    torch.set_num_threads(1)
    recipe_ = recipe(**changes)
    plan_, learner = plan(recipe_), small_learner(recipe_)
    batch = next(batches(plan_, ranks, STEP))
    before, crops = {name: value.clone() for name, value in flat(learner.f_k.state_dict()).items()}, batch.crops.clone()
    with mock.patch("moco_ray.ahead.permutation", unshuffled) if identity else contextlib.nullcontext():
        leak = probe_leak(learner.f_k, batch, plan_, ranks, STEP, row)
    same = all(torch.equal(value, before[name]) for name, value in flat(learner.f_k.state_dict()).items())
    sums = [value for name, value in learner.f_k.named_buffers() if name.endswith(("sums", "groups_seen"))]
    return leak, same and torch.equal(crops, batch.crops) and not any(value.any() for value in sums)


def unshuffled(seed, step, groups, rows_per_group, **_) -> torch.Tensor:
    return torch.arange(groups * rows_per_group)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("row", [0, 13, 31])
def test_with_the_shuffle_one_key_group_moves_and_of_its_query_group_only_the_balanced_share(pool, world, row):
    answers = pool.run(world, probed, {}, row)
    assert len({leak for leak, _ in answers}) == 1 and all(untouched for _, untouched in answers)
    leak = answers[0][0]
    assert leak == Leak(moved=4, of_own_group=1, allowed=1, group_rows=4)  # 8 groups of 4 rows: no two of one group meet
    assert not leak.leaks and not leak.spreads


@pytest.mark.parametrize("world", [1, 2])
def test_without_the_shuffle_all_of_its_query_group_moves_and_the_probe_says_so(pool, world):
    for leak, _ in pool.run(world, probed, {}, 13, True):
        assert leak == Leak(4, 4, 1, 4) and leak.leaks and not leak.spreads


def test_two_groups_of_eight_share_half_by_design_and_float32_and_the_symmetric_form_are_probed_alike(pool):
    few = {"batch": {"global_batch_size": 16, "bn_group_size": 8}}
    assert pool.run(2, probed, few, 9)[0][0] == Leak(8, 4, 4, 8)
    both = {"contrast": {"symmetric": True}, "encoder": {"precision": "float32"}}
    assert pool.run(2, probed, both, 5)[0][0] == Leak(4, 1, 1, 4)
    assert pool.run(2, probed, both, 5, True)[0][0].leaks


def test_statistics_over_more_than_a_group_move_other_keys_too():
    """As a BatchNorm that is not grouped, or SyncBatchNorm, would."""
    recipe_ = recipe()
    plan_, learner = plan(recipe_), small_learner(recipe_)
    for layer in learner.f_k.modules():
        if hasattr(layer, "group_rows"):
            layer.group_rows = 32
    leak = probe_leak(learner.f_k, next(batches(plan_, Ranks(), STEP)), plan_, Ranks(), STEP)
    assert leak.moved == 32 and leak.spreads and leak.leaks
