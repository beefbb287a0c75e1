"""The project's main test: how many ranks carry a run does not change its mathematics.

float64 under gloo, G = 8 groups, worlds 1 to 4 (3 ranks own 3, 3 and 2 groups), 20 steps over two epoch
ends, a queue that the batch does not divide. Then the same with something broken, to see that it would be
noticed; and the leak probe.
"""

import contextlib
from unittest import mock

import pytest
import torch

from moco_ray.learner import Learner
from moco_ray.method.contrast import info_nce
from moco_ray.method.shuffle import permutation, route, unshuffle
from moco_ray.plan import groups_of_rank
from moco_ray.ranks import Ranks
from moco_ray.train import encode_keys, rows_of
from tests import synthetic

TOLERANCE = 1e-9
VARIANTS = {
    "plain": {},
    "one group a pass": {"run": {"groups_per_forward": 1}},
    "symmetric, two groups a pass": {"contrast": {"symmetric": True}, "run": {"groups_per_forward": 2}},
    "shuffled in domains of 4 groups": {"batch": {"shuffle_domain_groups": 4}},
}


def carry(ranks: Ranks, changes: dict, broken: str = "", until: int | None = None, new=synthetic.small_learner):
    """Train as `ranks`; returns losses, the averaged state, and whether the queue was equal on all ranks."""
    with contextlib.ExitStack() as stack:
        if broken:
            stack.enter_context(BREAKS[broken](ranks))
        log, learner = synthetic.run(ranks, synthetic.recipe(**changes), until=until, new=new)
        learner.average_statistics(ranks, 8)
    return log.losses(), synthetic.copy_state(learner.state_dict()), ranks.same_on_all(learner.queue.fingerprint())


@pytest.fixture(scope="module")
def alone(pool):
    """The run of one rank, for each variant."""
    results = {}

    def of(name: str):
        if name not in results:
            results[name] = pool.run(1, carry, VARIANTS[name])[0]
        return results[name]

    return of


@pytest.mark.parametrize(
    "variant,world",
    [("plain", 2), ("plain", 3), ("plain", 4), ("one group a pass", 1), ("one group a pass", 3)]
    + [("symmetric, two groups a pass", 3), ("shuffled in domains of 4 groups", 3)],
)
def test_losses_queue_and_statistics_do_not_depend_on_the_world_size(pool, alone, variant, world):
    base = "plain" if variant == "one group a pass" else variant
    losses, state, _ = alone(base)
    assert len(losses) == 20 and max(losses) - min(losses) > 0.1  # something was learned, or unlearned
    for rank_losses, rank_state, queue_equal in pool.run(world, carry, VARIANTS[variant]):
        assert queue_equal
        assert rank_losses == pytest.approx(losses, abs=TOLERANCE)
        assert synthetic.largest_difference(rank_state, state) < TOLERANCE


def test_a_resnet_is_no_exception(pool):
    """The same with the product's own encoder, for fewer steps: it costs half a second each."""
    (losses, state, _), *_ = pool.run(1, carry, {}, "", 5, Learner.new)
    rank_losses, rank_state, queue_equal = pool.run(3, carry, {}, "", 5, Learner.new)[2]
    assert queue_equal and rank_losses == pytest.approx(losses, abs=TOLERANCE)
    assert synthetic.largest_difference(rank_state, state) < TOLERANCE


# --- negative controls: each of these still trains, and must be noticed --------------------------------------------


def _permutation_of_the_rank(ranks):
    def wrong(seed, step, groups, n, **settings):
        return permutation(seed + ranks.world, step, groups, n, **settings)

    return mock.patch("moco_ray.ahead.permutation", wrong)


def _share_of_equal_ranks(ranks):
    """DDP's mean taken for a mean over rows: right only where every rank owns as many."""
    own = len(groups_of_rank(8, ranks.world, ranks.rank)) * 4

    def wrong(q, k, queue, temperature):
        contrast = info_nce(q, k, queue, temperature)
        value = contrast.loss.detach()
        return contrast._replace(loss=value + (contrast.loss - value) * (32 / ranks.world / own))

    return mock.patch("moco_ray.train.info_nce", wrong)


def _keys_of_the_last_rank(ranks):
    """The last rank's keys arrive with their first two rows swapped."""
    original = Ranks.begin_gather

    def wrong(self, rows, counts):
        if self.rank == self.world - 1:
            rows = rows[[1, 0, *range(2, len(rows))]]
        return original(self, rows, counts)

    return mock.patch.object(Ranks, "begin_gather", wrong)


def _statistics_of_the_rank(ranks):
    return mock.patch("moco_ray.learner.average_statistics", lambda module, ranks, share: None)


BREAKS = {
    "permutation": _permutation_of_the_rank,
    "share": _share_of_equal_ranks,
    "keys": _keys_of_the_last_rank,
    "statistics": _statistics_of_the_rank,
}


@pytest.mark.parametrize("broken", list(BREAKS))
def test_a_broken_piece_is_noticed(pool, alone, broken):
    losses, state, _ = alone("plain")
    wrong_losses, wrong_state, _ = pool.run(3, carry, {}, broken, 6)[0]
    seen = max(abs(a - b) for a, b in zip(wrong_losses, losses, strict=False))
    if broken == "statistics":  # touches no loss: only the averaged state shows it
        _, short_state, _ = pool.run(1, carry, {}, "", 6)[0]
        seen = synthetic.largest_difference(wrong_state, short_state)
    assert seen > 1000 * TOLERANCE


def one_rank_differs(ranks: Ranks):
    learner = synthetic.small_learner(synthetic.recipe())
    before = ranks.same_on_all(learner.queue.fingerprint())
    if ranks.rank == 1:
        learner.queue.keys[50, 3] += 1e-12
    return before, ranks.same_on_all(learner.queue.fingerprint())


def test_a_queue_that_differs_on_one_rank_in_one_bit_is_noticed(pool):
    assert pool.run(3, one_rank_differs) == [(True, False)] * 3


# --- the leak probe -----------------------------------------------------------------------------------------------


def keys_of_altered_image(ranks: Ranks, altered: int | None, shuffled: bool) -> torch.Tensor:
    """All keys of step 0; the key view of batch row `altered` is replaced."""
    recipe = synthetic.recipe()
    plan, learner = synthetic.plan(recipe), synthetic.small_learner(recipe)
    batch, own = next(synthetic.batches(plan, ranks)), rows_of(plan, ranks.world, ranks.rank)
    if altered in own:
        batch.crops[altered - own.start, 1] = 255 - batch.crops[altered - own.start, 1]
    unshuffled = mock.patch("moco_ray.ahead.permutation", lambda *a, **k: torch.arange(32))
    with contextlib.nullcontext() if shuffled else unshuffled:
        return encode_keys(learner.f_k, batch, plan, ranks, (0, 0))


@pytest.mark.parametrize("world", [1, 3])
def test_one_altered_image_moves_its_own_groups_keys_unshuffled_and_scattered_groups_shuffled(pool, world):
    def moved(shuffled: bool) -> list[int]:
        before = pool.run(world, keys_of_altered_image, None, shuffled)[0]
        after = pool.run(world, keys_of_altered_image, 13, shuffled)[0]
        return (before != after).any(1).nonzero()[:, 0].tolist()

    assert moved(shuffled=False) == [12, 13, 14, 15]  # group 3
    rows = moved(shuffled=True)
    perm = permutation(0, 0, 8, 4).view(8, 4)
    (group,) = (perm == 13).any(1).nonzero()[:, 0].tolist()
    assert rows == sorted(perm[group].tolist())
    assert len({row // 4 for row in rows}) == 4  # four rows of four different query groups


# --- permutation and route ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups,n", [(8, 32), (8, 4), (3, 5), (5, 3), (2, 2), (64, 32)])
def test_permutation_is_balanced_between_every_pair_of_groups(groups, n):
    for step in range(5):
        perm = permutation(7, step, groups, n)
        assert sorted(perm.tolist()) == list(range(groups * n))
        met = torch.zeros(groups, groups, dtype=torch.int64)
        for slot, row in enumerate(perm.tolist()):
            met[slot // n, row // n] += 1
        assert met.min() >= n // groups and met.max() <= -(-n // groups)


def test_permutation_depends_on_seed_step_and_direction_and_is_uniform_for_each_row():
    assert torch.equal(permutation(1, 2, 8, 4), permutation(1, 2, 8, 4))
    others = [permutation(2, 2, 8, 4), permutation(1, 3, 8, 4), permutation(1, 2, 8, 4, direction=1)]
    assert not any(torch.equal(permutation(1, 2, 8, 4), other) for other in others)
    slots = torch.stack([unshuffle(torch.arange(12), permutation(0, s, 4, 3)) for s in range(4000)])
    counts = torch.stack([torch.bincount(column, minlength=12) for column in slots.T]).double()  # row, slot
    chi_square = float(((counts - 4000 / 12) ** 2 / (4000 / 12)).sum())
    assert chi_square < 121 + 5 * (2 * 121) ** 0.5  # 11 x 11 degrees of freedom, five standard deviations


def test_shuffle_domain_keeps_rows_within_their_run_of_groups():
    perm = permutation(0, 3, 8, 4, domain=2)
    assert all(slot // 8 == row // 8 for slot, row in enumerate(perm.tolist()))
    assert not torch.equal(perm, torch.arange(32))


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_route_brings_every_rank_the_rows_of_its_slots(world):
    perm = permutation(0, 0, 8, 4)
    ranges = [range(4 * g.start, 4 * g.stop) for g in (groups_of_rank(8, world, r) for r in range(world))]
    ways = [route(perm, ranges, rank) for rank in range(world)]
    sent = [
        (torch.arange(32)[r.start : r.stop][w.send_rows]).split(w.send_counts)
        for r, w in zip(ranges, ways, strict=True)
    ]
    for rank, way in enumerate(ways):
        arrived = torch.cat([sent[source][rank] for source in range(world)])
        assert way.receive_counts == [len(sent[source][rank]) for source in range(world)]
        expected = perm[ranges[rank].start : ranges[rank].stop]
        assert torch.equal(arrived[way.arrival], expected) and torch.equal(way.rows, expected)


@pytest.mark.parametrize("groups,world", [(8, 3), (8, 5), (64, 7), (4, 4), (8, 1)])
def test_groups_are_dealt_out_whole_in_order_and_evenly(groups, world):
    owned = [groups_of_rank(groups, world, rank) for rank in range(world)]
    assert [g for run in owned for g in run] == list(range(groups))
    assert max(map(len, owned)) - min(map(len, owned)) <= 1
