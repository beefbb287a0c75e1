"""A cluster that begins as a head alone grows for an elastic run and shrinks after it: by Ray's own autoscalers, on nodes that are processes here."""

import time

import pytest

from moco_ray.asking import AGAIN_SECONDS, LOOK_SECONDS, SETTLE_SECONDS, Asking, Elastic
from moco_ray.plan import Workers
from tests.autoscaling import FakeAutoscaling
from tests.carried import Carried


class Autoscaler:
    """One that makes room for all that is asked for or for none of it, up to a limit, at once; and the clock."""

    def __init__(self, limit: int):
        self.limit, self.room, self.asked, self.now, self.said = limit, 0, 0, 0.0, []

    def hear(self, number: int) -> None:
        self.asked = number
        if number <= self.limit:
            self.room = max(self.room, number)

    def asking(self, least: int, most: int) -> Asking:
        return Asking(Workers(most, least), lambda: self.room, lambda: self.asked > self.limit, self.said.append, lambda: self.now)

    def pass_by(self, asking: Asking, seconds: float) -> list[int]:
        """What is asked for meanwhile, without repetitions."""
        numbers, end = [], self.now + seconds
        while self.now < end:
            self.now += LOOK_SECONDS
            numbers.append(asking.number())
            self.hear(numbers[-1])
        return [number for place, number in enumerate(numbers) if not place or number != numbers[place - 1]]


@pytest.mark.parametrize("limit, asked", [(8, [8]), (4, [8, 4, 6, 5, 4]), (5, [8, 4, 6, 5]), (1, [8, 4, 2, 1]), (7, [8, 4, 6, 7])])
def test_what_an_autoscaler_refuses_is_asked_for_again_by_halves(limit, asked):
    cluster = Autoscaler(limit)
    asking = cluster.asking(1, 8)
    assert cluster.pass_by(asking, 6 * SETTLE_SECONDS) == asked
    assert cluster.room == limit
    assert cluster.said == ([] if limit == 8 else ["the autoscaler has no way to room for 8 workers, and makes all at once or none: asking for 4"])


@pytest.mark.parametrize("most", [1, 2, 3, 5, 16, 64])
def test_in_the_end_a_run_has_all_that_there_is(most):
    for limit in range(1, most + 3):
        cluster = Autoscaler(limit)
        cluster.pass_by(cluster.asking(1, most), 15 * SETTLE_SECONDS)
        assert cluster.room == min(limit, most)


def test_never_fewer_are_asked_for_than_the_run_needs_or_the_cluster_holds():
    cluster = Autoscaler(2)
    asking = cluster.asking(3, 8)
    assert set(cluster.pass_by(asking, 8 * SETTLE_SECONDS)) == {8, 5, 4, 3} and cluster.room == 0
    cluster.room = 6  # somebody started machines by hand
    assert cluster.pass_by(asking, SETTLE_SECONDS)[-1] >= 6


def test_a_limit_that_was_raised_is_found_some_time_later():
    cluster = Autoscaler(2)
    asking = cluster.asking(1, 4)
    cluster.pass_by(asking, 5 * SETTLE_SECONDS)
    cluster.limit = 4
    assert cluster.pass_by(asking, AGAIN_SECONDS) == [2, 4] and cluster.room == 4
    assert len(cluster.said) == 1


def test_the_driver_s_configuration_says_what_the_user_wants():
    assert Elastic(num_workers=(1, 8)).max_workers == Elastic(num_workers=8).max_workers == 8


@pytest.mark.slow
def test_a_cluster_of_a_head_alone_grows_with_an_elastic_run_and_shrinks_after_it(tmp_path):
    """Ray's first autoscaler: one node is to be had at first, two once the run is under way, and three that nobody needs."""
    with FakeAutoscaling(max_nodes=1, node_cpus=2, idle_seconds=10) as cluster:
        assert cluster.workers() == 0
        run = Carried(tmp_path, cluster.environment, steps=60, every=10)
        began = time.time()
        run.start("1:2")
        run.wait_for_step(12, 180)
        print(f"from a head alone to the first step: {run.metrics()[0]['wall_time'] - began:.1f} s")
        assert cluster.workers() == 1 and [attempt["workers"] for attempt in run.attempts()] == [1]
        cluster.allow(3)
        moment = time.time()
        run.wait(lambda: run.attempts()[-1]["workers"] == 2, 240, "two workers")
        print(f"from the second node's being to be had to two workers: {time.time() - moment:.1f} s")
        refuse_other_than_grown_and_shrunk(run, cluster)
        assert {entry["workers"] for entry in run.metrics()} == {1, 2}


@pytest.mark.slow
def test_a_cluster_that_may_have_fewer_machines_than_a_run_would_take_grows_to_what_there_is(tmp_path):
    """Ray's second autoscaler, which starts none for a request that is too large."""
    with FakeAutoscaling(max_nodes=2, node_cpus=2, idle_seconds=10, second=True) as cluster:
        run = Carried(tmp_path, cluster.environment, steps=40, every=10)
        began = time.time()
        run.start("1:3")
        run.wait(lambda: run.attempts() and run.attempts()[-1]["workers"] == 2, 240, "two workers")
        print(f"from a head alone to two workers: {time.time() - began:.1f} s")
        assert "the autoscaler has no way to room for 3 workers" in run.words
        refuse_other_than_grown_and_shrunk(run, cluster)


def refuse_other_than_grown_and_shrunk(run: Carried, cluster: FakeAutoscaling) -> None:
    assert cluster.workers() >= 2
    run.finish()
    ended = time.time()
    cluster.wait_for_nodes(1, 90)
    print(f"from the end of the run to a head alone: {time.time() - ended:.1f} s")
    run.refuse_other_than_undisturbed()
