"""The order of an epoch: which rows make a step, without reading anything."""

import numpy as np
import pytest

from moco_ray.data.order import EpochOrder
from moco_ray.data.segment import Segments
from moco_ray.plan import Plan, groups_of_rank
from moco_ray.recipe import Recipe

# name: chunk rows, global batch, rows of a BN group. More shapes than one, for each breaks another shortcut.
SHAPES = {
    "even chunks": ([32] * 40, 32, 4),
    "fewer chunks than groups": ([500, 411], 64, 8),
    "one chunk": ([777], 24, 3),
    "very unequal shards": ([1, 3000, 2, 2, 700, 1, 1, 50], 96, 12),
    "several windows": ([128] * 100, 64, 8),
    "several windows of very unequal shards": ([1, 7000, 2, 0, 1700, 1, 130, 509], 96, 12),
    "files of a tree": ([1] * 1003, 40, 5),
    "a group size that divides no chunk": ([7, 11, 13] * 40, 35, 7),
    "chunks without rows": ([0, 40, 0, 0, 41, 0], 16, 4),
    "exactly one step": ([10, 6], 16, 4),
    "nothing dropped": ([64] * 8, 64, 8),
}


def plan_of(shape: str, steps: int = 0) -> tuple[np.ndarray, Plan]:
    chunks, batch, group = SHAPES[shape]
    schedule = {"steps": steps} if steps else {"epochs": 3}
    recipe = Recipe.parse({"schedule": schedule, "batch": {"global_batch_size": batch, "bn_group_size": group}})
    return np.array(chunks, np.int64), Plan(recipe, sum(chunks))


def epoch_rows(order: EpochOrder) -> np.ndarray:
    """Rows of every step and group, S,G,n, in the order in which the loop would see them."""
    return np.stack([[order.rows_of(step, group) for group in range(order.groups)] for step in range(order.steps)])


@pytest.mark.parametrize("shape", SHAPES)
def test_an_epoch_gives_each_row_at_most_once_and_drops_R_mod_B(shape):
    chunks, plan = plan_of(shape)
    for epoch in range(3):
        rows = epoch_rows(EpochOrder(chunks, plan, 5, epoch)).ravel()
        assert len(set(rows.tolist())) == len(rows) == plan.rows - plan.rows % plan.recipe.batch.global_batch_size
        assert rows.min() >= 0 and rows.max() < plan.rows


@pytest.mark.parametrize("shape", SHAPES)
def test_the_order_is_the_one_that_the_module_describes(shape):
    """Against a slow reading of the three steps, row by row."""
    chunks, plan = plan_of(shape)
    order, first = EpochOrder(chunks, plan, 9, 4), np.concatenate([[0], np.cumsum(chunks)])
    laid = []
    n, steps = plan.recipe.batch.bn_group_size, plan.steps_per_epoch
    kept = min(steps * plan.recipe.batch.global_batch_size, plan.rows - 1)
    for chunk in np.random.default_rng([9, 101, 4]).permutation(len(chunks)):
        rows = list(range(first[chunk], first[chunk + 1]))
        if len(laid) <= kept < len(laid) + len(rows):  # the cut goes through it
            turn = np.random.default_rng([9, 103, 4]).integers(len(rows))
            rows = rows[turn:] + rows[:turn]
        laid += rows
    for group in range(plan.groups):
        stream = laid[group * steps * n : (group + 1) * steps * n]
        size, given = plan.window_steps * n, []
        for window, start in enumerate(range(0, len(stream), size)):
            some = np.array(stream[start : start + size])
            given += some[np.random.default_rng([9, 102, 4, group, window]).permutation(len(some))].tolist()
        for step in range(steps):
            assert order.rows_of(step, group).tolist() == given[step * n : (step + 1) * n]
            assert order.positions_of(step, group).tolist() == [
                step * plan.recipe.batch.global_batch_size + group * n + j for j in range(n)
            ]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ranks_share_every_step_without_overlap_also_after_a_resume_on_another_world(shape, world):
    """Over all ranks and segments: each position of each remaining step once, whatever step the run resumes from."""
    _, plan = plan_of(shape)
    batch = plan.recipe.batch
    for start in {0, 1, plan.steps_per_epoch // 2, plan.steps_per_epoch + 1, plan.total_steps - 1} - {plan.total_steps}:
        seen = np.zeros((plan.total_steps, plan.groups), int)
        for rank in range(world):
            segments = Segments(plan, world, rank, start)
            assert segments.groups == groups_of_rank(plan.groups, world, rank)
            expected = start
            for segment in (segments[index] for index in range(len(segments))):
                first = segment.epoch * plan.steps_per_epoch
                assert first + segment.first_step == expected and segment.first_step < segment.stop_step
                assert segment.stop_step <= plan.steps_per_epoch, "a segment stays within an epoch"
                expected = first + segment.stop_step
                seen[first + segment.first_step : expected, segments.groups.start : segments.groups.stop] += 1
            assert expected == plan.total_steps
        assert (seen[:start] == 0).all() and (seen[start:] == 1).all()
        assert seen.shape[1] * batch.bn_group_size == batch.global_batch_size


def test_segments_of_a_run_hold_whole_windows_of_256_to_4096_rows_where_a_window_is_not_longer():
    for pixels, batch, worlds in [(32, 256, (1, 2, 3, 4, 8)), (224, 256, (1, 2, 3, 4, 8)), (224, 4096, (1, 3, 128))]:
        recipe = Recipe.parse(
            {"schedule": {"epochs": 2}, "augment": {"image_pixels": pixels}, "batch": {"global_batch_size": batch}}
        )
        plan = Plan(recipe, 1_281_167)
        for world in worlds:
            segments = Segments(plan, world, 0, 0)
            rows = segments.steps_per_segment * segments.rows_per_step
            assert segments.steps_per_segment % plan.window_steps == 0
            assert 256 <= rows <= 4096, (pixels, batch, world, rows)


def test_a_run_that_ends_within_an_epoch_ends_its_last_segment_there():
    _, plan = plan_of("very unequal shards", steps=5)
    segments = Segments(plan, 2, 1, 3)
    assert [tuple(segments[index]) for index in range(len(segments))] == [(0, 3, 5)]
    assert len(Segments(plan, 2, 1, 5)) == 0
    with pytest.raises(IndexError, match="segment 1 of 1"):
        segments[1]


def test_another_epoch_has_another_order_and_drops_other_rows():
    chunks, plan = plan_of("files of a tree")
    epochs = [epoch_rows(EpochOrder(chunks, plan, 5, epoch)) for epoch in range(3)]
    dropped = [set(range(plan.rows)) - set(rows.ravel().tolist()) for rows in epochs]
    for one, other in ((0, 1), (1, 2), (0, 2)):
        assert dropped[one] != dropped[other]
        assert (epochs[one] == epochs[other]).mean() < 0.05
    assert len(dropped[0]) == 3


@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_no_row_is_left_out_for_ever_however_few_the_chunks(chunks):
    sizes = np.array([100] * chunks)
    recipe = Recipe.parse({"schedule": {"epochs": 3}, "batch": {"global_batch_size": 64, "bn_group_size": 8}})
    plan, seen = Plan(recipe, 100 * chunks), set()
    assert plan.dropped_rows
    for epoch in range(60):
        seen |= set(epoch_rows(EpochOrder(sizes, plan, 5, epoch)).ravel().tolist())
    assert seen == set(range(plan.rows))


def test_another_seed_has_another_order_and_the_same_seed_the_same():
    chunks, plan = plan_of("even chunks")
    first, again, other = (epoch_rows(EpochOrder(chunks, plan, seed, 0)) for seed in (5, 5, 6))
    assert (first == again).all() and (first == other).mean() < 0.05


def test_rows_mix_within_a_window_and_a_window_reads_few_chunks():
    chunks, plan = plan_of("several windows")
    order = EpochOrder(chunks, plan, 5, 0)
    assert order.windows == 4
    for window in range(3):
        rows = order.window_rows(3, window)
        assert len(rows) == plan.window_steps * plan.recipe.batch.bn_group_size == 512
        assert (np.diff(rows) == 1).mean() < 0.05, "neighbours in a file are no neighbours in a batch"
        assert len(set(rows // 128)) <= 512 // 128 + 1


def test_asking_out_of_turn_does_not_change_the_answer():
    """The cached window is a cache and no state."""
    chunks, plan = plan_of("several windows")
    forward, order = epoch_rows(EpochOrder(chunks, plan, 5, 1)), EpochOrder(chunks, plan, 5, 1)
    for step, group in [(130, 7), (0, 0), (130, 7), (1, 3), (199, 0)]:
        assert order.rows_of(step, group).tolist() == forward[step, group].tolist()


def test_the_order_refuses_chunks_of_another_data_set_and_steps_out_of_range():
    chunks, plan = plan_of("even chunks")
    with pytest.raises(ValueError, match="the chunks hold 1248 rows and the plan 1280"):
        EpochOrder(chunks[1:], plan, 0, 0)
    order = EpochOrder(chunks, plan, 0, 0)
    with pytest.raises(IndexError, match="the epoch has 40 steps"):
        order.rows_of(40, 0)
    with pytest.raises(IndexError, match="there are 8 groups"):
        order.window_rows(8, 0)
