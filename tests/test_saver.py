"""Checkpoints behind the loop's back, and when the loop looks up from its work."""

import os
import sys
import threading
import time

import pytest
import torch

from moco_ray.checkpoint import Saved
from moco_ray.errors import StorageFailing, UserError
from moco_ray.lookout import Lookout, News, Notice
from moco_ray.ranks import Ranks
from moco_ray.saver import FAILED_SAVES, Saver, host_copy


class Told(list):
    """What a saver told."""

    def __call__(self, **message):
        self.append(message)

    def kinds(self) -> list[str]:
        return [f"{message['kind']} {message['step']}" for message in self]


def saved(step: int) -> Saved:
    return Saved(step, 1, 10, "", {})


def test_a_step_does_not_wait_for_the_storage_and_what_is_written_is_the_state_as_it_was():
    go, written, told = threading.Event(), [], Told()
    weight = torch.zeros(3)

    def write(step, state):
        assert go.wait(10)
        written.append(state["deep"][0].clone())
        return saved(step)

    saver = Saver(write, told)
    saver.save(7, {"deep": [weight], "step": 7})  # returns though nothing can be written yet
    weight.fill_(1.0)  # the next step of the optimizer, in place
    assert written == [] and told == []
    go.set()
    saver.finish()
    assert torch.equal(written[0], torch.zeros(3)) and told.kinds() == ["saved 7"]
    assert told[0]["bytes"] == 10 and 0 <= told[0]["seconds_waited"] < 5
    assert saver.take_newest() == saved(7) and saver.take_newest() is None


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere niceness is a whole process's")
def test_where_cores_are_scarce_the_thread_that_writes_goes_last_and_the_loop_keeps_its_place():
    before, seen = os.nice(0), []

    def write(step, state):
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return saved(step)

    Saver(write, Told()).save(1, {}, wait=True)
    assert seen == [19] and os.nice(0) == before


def test_one_that_is_due_while_another_is_written_is_left_out_and_said_so_but_the_last_one_waits():
    go, told, steps = threading.Event(), Told(), []

    def write(step, state):
        assert go.wait(10)
        steps.append(step)
        return saved(step)

    saver = Saver(write, told)
    saver.save(1, {})
    saver.save(2, {})
    assert told.kinds() == ["skipped 2"]
    threading.Timer(0.2, go.set).start()
    saver.save(3, {}, wait=True)
    assert steps == [1, 3] and told.kinds() == ["skipped 2", "saved 1", "saved 3"]


def failing(times: int, kind: type[UserError] = UserError):
    left = [times]

    def write(step, state):
        if left[0] > 0:
            left[0] -= 1
            raise kind(f"could not save the checkpoint of step {step}: it rains")
        return saved(step)

    return write


def test_a_failed_save_is_told_and_training_goes_on_until_several_in_a_row_have_failed():
    told = Told()
    saver = Saver(failing(FAILED_SAVES + 1), told)
    for step in range(1, FAILED_SAVES + 1):
        saver.save(step, {})
        saver.finish()
    assert told.kinds() == [f"not_saved {step}" for step in range(1, FAILED_SAVES + 1)] and "it rains" in told[0]["why"]
    with pytest.raises(UserError, match="4 checkpoints in a row could not be saved; the last: .* step 4: it rains"):
        saver.save(FAILED_SAVES + 1, {})  # is tried, and waited for


def test_after_several_failures_the_next_save_decides():
    told = Told()
    saver = Saver(failing(FAILED_SAVES), told)
    for step in range(FAILED_SAVES + 2):
        saver.save(step, {})
        if step < FAILED_SAVES:
            saver.finish()
    saver.finish()
    assert told.kinds()[-2:] == ["saved 3", "saved 4"]


def test_a_storage_that_may_come_back_is_waited_for(monkeypatch):
    """Failures in a row do not end the run before the outage has lasted; the last save is tried all that time."""
    monkeypatch.setattr("moco_ray.saver.PAUSE_SECONDS", 0.01)
    told = Told()
    saver = Saver(failing(FAILED_SAVES + 3, StorageFailing), told)
    for step in range(FAILED_SAVES + 1):
        saver.save(step, {})
        saver.finish()
    saver.save(9, {}, wait=True)
    assert told.kinds()[-1] == "saved 9"
    monkeypatch.setattr("moco_ray.saver.OUTAGE_SECONDS", 0.05)
    with pytest.raises(UserError, match="checkpoints in a row could not be saved"):
        Saver(failing(10**6, StorageFailing), Told()).save(9, {}, wait=True)


def test_failures_that_are_not_in_a_row_do_not_add_up():
    told, fails = Told(), iter([True, True, False, True, True, False])

    def write(step, state):
        if next(fails):
            raise UserError("no")
        return saved(step)

    saver = Saver(write, told)
    for step in range(6):
        saver.save(step, {})
        saver.finish()
    assert told.kinds()[-1] == "saved 5"


def test_the_last_checkpoint_is_tried_again_and_its_failure_is_raised(monkeypatch):
    monkeypatch.setattr("moco_ray.saver.PAUSE_SECONDS", 0.01)
    told = Told()
    Saver(failing(1), told).save(9, {}, wait=True)
    assert told.kinds() == ["not_saved 9", "saved 9"]
    with pytest.raises(UserError, match="it rains"):
        Saver(failing(FAILED_SAVES), Told()).save(9, {}, wait=True)


def test_one_that_was_asked_for_is_not_left_out_but_follows_the_one_being_written():
    go, steps = threading.Event(), []

    def write(step, state):
        assert go.wait(10)
        steps.append(step)
        return saved(step)

    saver = Saver(write, Told())
    saver.save(1, {})
    threading.Timer(0.1, go.set).start()
    saver.save(2, {}, must=True)
    saver.finish()
    assert steps == [1, 2]


def test_a_fault_of_ours_in_the_thread_is_raised_at_the_next_save():
    def write(step, state):
        raise RuntimeError("a bug")

    saver = Saver(write, Told())
    saver.save(1, {})
    with pytest.raises(RuntimeError, match="a bug"):
        saver.finish()


def test_a_host_copy_shares_no_memory_and_keeps_the_structure():
    state = {"a": torch.arange(3), "b": [{"c": torch.ones(2)}, (1, "x")], "n": None}
    copy = host_copy(state)
    state["a"] += 1
    state["b"][0]["c"] *= 5
    assert torch.equal(copy["a"], torch.arange(3)) and torch.equal(copy["b"][0]["c"], torch.ones(2))
    assert copy["b"][1] == (1, "x") and copy["n"] is None


# --- looking up ----------------------------------------------------------------------------------------------------


class World:
    """What a lookout hears, set by a test; counts how often it asked."""

    def __init__(self):
        self.notice, self.order, self.asked, self.stop = None, None, 0, ""

    def news(self) -> News:
        def notice():
            self.asked += 1
            return self.notice

        return News(notice, lambda: self.order, lambda: None, lambda: self.stop)


def looking(world: World, minutes: float = 0.0, step: int = 0) -> Lookout:
    lookout = Lookout(Ranks(), world.news(), minutes, step)
    lookout._steps_to_next = lambda step: 1  # at every step: the pace has a test of its own
    return lookout


def test_a_notice_saves_at_once_and_again_at_the_last_moment_and_then_halts():
    world = World()
    lookout = looking(world)
    assert not lookout.look(1).save
    world.notice = Notice((1,), time.time() + 30)
    first = lookout.look(2)
    assert "the machine of worker 1 is taken away in 30 s" in first.save and not first.halt_until
    assert not lookout.look(3).save  # once
    world.notice = Notice((1,), time.time() + 3)
    last = lookout.look(4)
    assert "the last moment" in last.save and last.halt_until == world.notice.deadline
    assert not lookout.look(5).save


def test_a_notice_for_another_machine_too_saves_again_and_one_without_a_time_saves_once():
    world = World()
    lookout = looking(world)
    world.notice = Notice((1,), None)
    assert lookout.look(1).save and not lookout.look(2).save
    world.notice = Notice((1, 2), None)
    assert "worker 1, 2" in lookout.look(3).save


def test_an_order_is_obeyed_once():
    world = World()
    lookout = looking(world)
    world.order = ("node b joined", 1.0)
    assert lookout.look(1).save == "node b joined" and not lookout.look(2).save
    world.order = ("node b joined", 2.0)  # again, later
    assert lookout.look(3).save == "node b joined"


def test_a_run_that_is_to_end_is_saved_first_whatever_else_is_asked_for():
    world = World()
    lookout = looking(world)
    assert not lookout.look(1).stop
    world.order, world.notice, world.stop = ("node b joined", 1.0), Notice((1,), time.time() + 3), "SIGTERM"
    advice = lookout.look(2)
    assert advice.stop and advice.save == "SIGTERM" and not advice.halt_until


def test_minutes_since_the_last_checkpoint_make_one_due(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("moco_ray.lookout.time.monotonic", lambda: now[0])
    lookout = looking(World(), minutes=10)
    now[0] += 599
    assert not lookout.look(1).save
    now[0] += 2
    assert lookout.look(2).save == "10 minutes have passed since the last"
    now[0] += 599
    assert not lookout.look(3).save
    lookout.saved()  # one that the recipe's steps made due
    now[0] += 599
    assert not lookout.look(4).save


def test_it_looks_about_every_second_whatever_a_step_takes(monkeypatch):
    for step_seconds, between in ((0.001, 1000), (0.1, 10), (5.0, 1)):
        now, world = [0.0], World()
        monkeypatch.setattr("moco_ray.lookout.time.monotonic", lambda now=now: now[0])
        lookout, asked = Lookout(Ranks(), world.news(), 0, 1000), []
        for step in range(1001, 4001):
            now[0] += step_seconds
            before = world.asked
            lookout.look(step)
            if world.asked > before:
                asked.append(step)
        assert asked[-1] - asked[-2] == pytest.approx(between, abs=1), step_seconds


def look_of_a_rank(ranks: Ranks):
    """Rank 0 alone has an order; do all get the same advice at the same steps?"""
    world = World()
    world.order = ("x", 1.0) if ranks.is_first else None
    lookout = Lookout(ranks, world.news(), 0, 0)
    return [lookout.look(step).save for step in range(1, 5)]


def test_all_ranks_look_at_the_same_steps_and_get_rank_0_s_answer(pool):
    first, *others = pool.run(3, look_of_a_rank)
    assert first[0] == "x" and all(other == first for other in others)
