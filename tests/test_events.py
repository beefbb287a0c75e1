"""The story of a run in plain words, and its counters."""

import pytest

from moco_ray.board import Pulse
from moco_ray.events import DIED, SILENT_SECONDS, SLOW_RECORDS, Events


class Clock:
    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr("moco_ray.events.time.time", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def story(clock):
    lines, placed = [], []  # all but where everything sits, and that

    def tell(kind, step, text, **facts):
        (placed if kind == "placed" else lines).append((kind, step, text, facts))

    events = Events(tell)
    events.lines, events.placed = lines, placed
    return events


def begin(events, step, *nodes, skipped=()):
    events.begin({"from_step": step, "nodes": list(nodes), "skipped": list(skipped), "seating": "where"})


def test_a_lost_node_is_one_story_with_its_steps_and_seconds(story, clock):
    story.cluster({"1": "a", "2": "b", "3": "c"})
    begin(story, 0, "a", "b", "c")
    for step in range(1, 58):
        clock.now += 1
        story.at(step)
    clock.now += 2
    story.failed({0: "another worker was lost", 2: DIED})
    story.cluster({"1": "a", "2": "b"})
    clock.now += 7
    begin(story, 50, "a", "b")
    assert [line[2] for line in story.lines] == [
        "3 workers from step 0 on a, b, c",
        "worker 2 on c died; step 57 was reached",
        "lost node c at step 57",
        "lost node c: continuing with 2 workers (3 before) from step 50, 7 steps are computed again (9.0 s without a step) on a, b",
    ]
    assert story.placed == [("placed", 0, "where", {}), ("placed", 50, "where", {})]
    story.at(51)
    assert len(story.lines) == 4  # not caught up yet
    clock.now += 5
    story.at(57)
    assert story.lines[-1][2] == "back at step 57: 14.0 s lost"
    assert story.lines[-1][3] == {"restarts": 1, "steps_recomputed": 7, "seconds_lost": 14.0}
    story.at(58)
    assert len(story.lines) == 5


def test_growth_is_told_as_such_and_costs_nothing_where_a_checkpoint_was_just_written(story, clock):
    story.cluster({"1": "a"})
    begin(story, 0, "a")
    story.at(20)
    assert story.cluster({"1": "a", "2": "b"}) == ["b"]
    clock.now += 4
    begin(story, 20, "a", "b")
    assert "node b joined at step 20" in story.lines[1][2]
    assert story.lines[2][2].startswith("the cluster changed: continuing with 2 workers (1 before) from step 20, no step is lost")
    assert story.counters["steps_recomputed"] == 0 and story.counters["restarts"] == 1


def test_failures_before_the_first_step_and_damaged_checkpoints_are_told(story, clock):
    begin(story, 40, "a", skipped=["the checkpoint x is damaged: bits; using the one of step 40 before it"])
    assert [line[0] for line in story.lines] == ["skipped_checkpoint", "started"] and story.reached == 40
    assert story.placed == []  # on one machine there is nothing to say
    story.failed({0: "RuntimeError: a bug"})
    assert story.lines[-1][2] == "worker 0 on a failed: RuntimeError: a bug; step 40 was reached"


def test_a_rank_that_falls_silent_is_named_once_and_again_only_after_it_was_heard(story):
    begin(story, 0, "a", "b")
    quiet, well = Pulse(5, SILENT_SECONDS + 1), Pulse(5, 0.5)
    story.pulses({0: well, 1: quiet}, 120)
    story.pulses({0: well, 1: quiet}, 120)
    told = [line[2] for line in story.lines if line[0] == "silent"]
    assert len(told) == 1 and "worker 1 on b has not been heard of for 16 s, at step 5" in told[0] and "after 2:00" in told[0]
    story.pulses({0: well, 1: well}, 120)
    story.pulses({0: well, 1: quiet}, 120)
    assert len([line for line in story.lines if line[0] == "silent"]) == 2


def test_when_nobody_is_heard_it_is_the_driver_and_no_rank_is_named(story):
    begin(story, 0, "a", "b")
    story.pulses({0: Pulse(5, 99), 1: Pulse(5, 99)}, 120)
    assert "silent" not in [line[0] for line in story.lines]


def test_a_slow_rank_is_named_after_several_records_in_a_row_that_agree(story):
    begin(story, 0, "a", "b")
    verdict = {"rank": 1, "others_wait_share": 0.6, "input_wait_share": 0.0}
    for seen in [verdict] * (SLOW_RECORDS - 1) + [None] + [verdict] * (SLOW_RECORDS - 1):
        story.slow(seen, 10)
    assert "slow" not in [line[0] for line in story.lines]
    story.slow(verdict, 20)
    assert story.lines[-1][2] == "worker 1 on b is slow, it computes slowly; the others wait for it 60% of theirs"
    story.slow(verdict, 30)
    assert len([line for line in story.lines if line[0] == "slow"]) == 1
    story.slow(None, 40)
    for _ in range(SLOW_RECORDS):
        story.slow({**verdict, "rank": 0, "input_wait_share": 0.5}, 50)
    assert "worker 0 on a is slow, it waits for images 50% of the time" in story.lines[-1][2]


def test_a_checkpoint_says_what_it_took_and_what_a_failure_would_cost(story):
    begin(story, 0, "a")
    story.at(104)
    story.saved({"step": 100, "bytes": 370_000_000, "seconds": 3.21, "seconds_waited": 0.114}, 0.5, 100)
    assert story.lines[-1][2] == (
        "checkpoint of step 100 is safe (370 MB in 3.2 s, the step waited 0.11 s for the copy); a failure now costs 4 steps, "
        "before the next one at most 100 (0:50)"
    )
    story.at(250)
    story.not_saved({"step": 200, "why": "could not save the checkpoint of step 200: it rains"})
    assert story.lines[-1][2].endswith("it rains. Training goes on; a failure now costs 150 steps")
    story.skipped({"step": 250})
    assert "no checkpoint of step 250" in story.lines[-1][2] and "costs 150 steps" in story.lines[-1][2]
