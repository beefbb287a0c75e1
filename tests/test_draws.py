"""Draws are a function of what they are for, and of nothing else."""

import time

import numpy as np
import pytest

from moco_ray.data.draws import COLOUR, CROP, REPLACE, uniforms

KEY = {"seed": 3, "epoch": 5, "view": 1, "stage": COLOUR, "count": 10}
RECORDED = [[0.011546754286331562, 0.24154919656271812], [0.6436367332217984, 0.06352798769864854]]
POSITIONS = np.array([0, 1, 2, 7, 1_281_166, 2**40])


def test_draws_are_one_fresh_numpy_philox_for_each_row():
    draws = uniforms(positions=POSITIONS, **KEY)
    for position, row in zip(POSITIONS, draws, strict=True):
        counter = np.array([0, COLOUR, position, 1], dtype=np.uint64)
        generator = np.random.Philox(key=np.array([3, 5], dtype=np.uint64), counter=counter)
        np.testing.assert_array_equal(row, np.random.Generator(generator).random(10))


def test_draws_of_the_first_positions_never_change():
    # Recorded with numpy 2.4: another value means that every run's augmentation has changed.
    draws = uniforms(0, 0, np.array([0, 1]), 0, CROP, 2)
    np.testing.assert_array_equal(draws, RECORDED)


def test_any_subset_in_any_order_gives_the_same_rows():
    draws = uniforms(positions=POSITIONS, **KEY)
    for chosen in ([3], [5, 0, 2], [4, 4], []):
        np.testing.assert_array_equal(uniforms(positions=POSITIONS[chosen], **KEY), draws[chosen])


def test_a_larger_count_only_appends():
    longer = uniforms(positions=POSITIONS, **{**KEY, "count": 23})
    np.testing.assert_array_equal(longer[:, :10], uniforms(positions=POSITIONS, **KEY))


@pytest.mark.parametrize("name, other", [("seed", 4), ("epoch", 6), ("view", 0), ("stage", CROP), ("stage", REPLACE)])
def test_every_part_of_the_key_makes_another_stream(name, other):
    draws, others = uniforms(positions=POSITIONS, **KEY), uniforms(positions=POSITIONS, **{**KEY, name: other})
    assert not np.isin(others, draws).any()


def test_no_draw_is_shared_between_the_streams_of_a_small_epoch():
    draws = [uniforms(0, 0, np.arange(500), view, stage, 22) for view in (0, 1) for stage in (CROP, COLOUR, REPLACE)]
    assert len(np.unique(draws)) == np.size(draws)


def test_draws_are_uniform_and_neighbouring_columns_and_rows_are_uncorrelated():
    draws = uniforms(positions=np.arange(20_000), **KEY)
    assert draws.dtype == np.float64 and draws.shape == (20_000, 10)
    assert draws.min() >= 0.0 and draws.max() < 1.0
    counts = np.stack([np.histogram(column, bins=20, range=(0, 1))[0] for column in draws.T])
    assert ((counts - 1000) ** 2 / 1000).sum(axis=1).max() < 50.8  # chi squared, 19 degrees of freedom: p = 1e-4
    columns = np.corrcoef(draws.T) - np.eye(10)
    rows = np.corrcoef(draws[:-1, 0], draws[1:, 0])[0, 1]
    assert max(np.abs(columns).max(), abs(rows)) < 4.5 / np.sqrt(20_000)


@pytest.mark.parametrize("name", ["seed", "epoch", "view", "stage", "positions"])
def test_a_negative_number_is_refused_instead_of_wrapping_round(name):
    with pytest.raises(ValueError, match="numbers >= 0"):
        uniforms(**{**KEY, "positions": POSITIONS, name: np.array([3, -1]) if name == "positions" else -1})


def test_512_rows_of_crop_draws_take_milliseconds():
    started = time.process_time()
    for _ in range(5):
        uniforms(0, 0, np.arange(512), 0, CROP, 22)
    assert (time.process_time() - started) / 5 < 0.02  # 2.5 ms on a Zen 4 core
