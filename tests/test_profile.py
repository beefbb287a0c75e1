"""A profile on request: the parts of a step add up to it, the trace shows them, and nothing else changes.

Without Ray; test_pretrain.py has one in a real run.
"""

import json
import re
import time
from unittest import mock

import pytest
import torch

from moco_ray.cli import main
from moco_ray.data.storage import Store
from moco_ray.errors import UserError
from moco_ray.parts import NAMES, OTHER, Parts
from moco_ray.ranks import Ranks
from moco_ray.step_profile import StepProfile, is_written, name_of, text
from moco_ray.train import train
from tests import synthetic


def steps_of(trace: dict) -> list[dict]:
    """The steps that a trace shows."""
    return [e for e in trace["traceEvents"] if e.get("ph") == "X" and e["name"].startswith("ProfilerStep#")]


def test_a_part_within_another_is_not_counted_into_it_and_what_is_in_none_is_other():
    clock, parts = iter(range(100)), Parts()
    with mock.patch("moco_ray.parts.time.perf_counter", lambda: next(clock)):
        with parts("input"):  # before it is started: not counted
            pass
        parts.start()  # 0
        with parts("backward"):  # 1
            with parts("loss"):  # 2
                next(clock), next(clock)
            next(clock)  # it ends at 5
            parts.turn("all-reduce")  # 7
        with parts("backward"):  # 8, 9
            pass  # 10
        seconds = parts.stop()  # 11
    assert {name: value for name, value in seconds.items() if value} == {"backward": 1 + 2 + 1, "loss": 3, "all-reduce": 1, OTHER: 1 + 1 + 1}
    assert sum(seconds.values()) == 11


def profiled(ranks: Ranks, steps: int, recipe_changes: dict, how: str = ""):
    """Train with a profile of so many steps on rank 0; the messages, the trace, the wall time of those steps, and the final state."""
    torch.set_num_threads(1)
    recipe = synthetic.recipe(run={"log_every_steps": 3, "checkpoint_every_steps": 4}, **recipe_changes)
    plan, learner, log, parts = synthetic.plan(recipe), synthetic.small_learner(recipe), synthetic.Log(), Parts()
    told, traces, ends = [], [], {}

    def written(first: int, trace: bytes) -> str:
        if how == "full":
            raise UserError("the disk is full")
        traces.append(json.loads(trace))
        return f"somewhere/{first}"

    asked = steps and ranks.is_first
    profile = StepProfile(steps, parts, 0, plan.total_steps, written, lambda **message: told.append(message)) if asked else None

    def completed(step: int) -> bool:
        ends[step] = time.perf_counter()
        if profile:
            profile.completed(step)
        return False

    train(learner, synthetic.batches(plan, ranks), plan, ranks, log.outputs()._replace(completed=completed, parts=parts))
    if profile:
        profile.close()
    return told, traces, ends, log.losses(), synthetic.copy_state(learner.state_dict())


def test_the_parts_of_the_steps_are_all_there_add_up_and_change_no_number(pool):
    changes = {"contrast": {"symmetric": True}}
    (told, (trace,), ends, losses, state), (others, *_) = pool.run(2, profiled, 6, changes)
    *_, plain_losses, plain_state = pool.run(2, profiled, 0, changes)[0]
    assert losses == plain_losses and synthetic.identical(state, plain_state) and not others
    (message,) = told
    assert message["kind"] == "profile" and message["step"] == 16
    seconds = message["seconds"]
    assert set(seconds) == {*NAMES, OTHER} and all(value > 0 for value in seconds.values())
    assert sum(seconds.values()) == pytest.approx(ends[16] - ends[10], rel=0.1)  # less what starting the clock took
    shares = [float(share) for share in re.findall(r"([\d.]+)%", message["text"])]
    assert len(shares) == 13 and sum(shares) == pytest.approx(100, abs=1)
    assert message["text"].startswith("profile of steps 11 to 16 on worker 0, ") and message["text"].endswith("trace: somewhere/10")
    assert len(steps_of(trace)) == 6
    times = {name: [e for e in trace["traceEvents"] if e["name"] == name and e.get("cat") == "user_annotation"] for name in NAMES}
    assert all(times[name] for name in NAMES if name != "all-reduce")  # that one begins within backward
    assert len(times["key forward"]) == len(times["query forward"]) == len(times["loss"]) == len(times["backward"]) == 12  # two directions
    assert len(times["optimizer"]) == len(times["enqueue"]) == 6


def test_a_trace_that_cannot_be_written_costs_the_profile_alone():
    told, traces, _, losses, _ = profiled(Ranks(), 3, {}, "full")
    assert not traces and len(losses) == 10 and told == [{"kind": "no_profile", "step": 13, "why": "the disk is full"}]


def test_a_profiler_that_does_not_start_costs_the_profile_alone():
    with mock.patch("moco_ray.step_profile.profile", side_effect=RuntimeError("no such device")):
        told, *_, losses, _ = profiled(Ranks(), 3, {})
    assert len(losses) == 10 and [message["why"] for message in told] == ["no such device"]


@pytest.mark.parametrize("length,asked,traced", [(20, 15, (6, 20)), (5, 99, (3, 5)), (3, 1, (3, 3))])
def test_a_run_that_is_too_short_is_traced_as_far_as_it_goes(length, asked, traced):
    told, traces, *_ = profiled(Ranks(), asked, {"schedule": {"steps": length}})
    assert f"profile of steps {traced[0]} to {traced[1]} " in told[0]["text"] and len(steps_of(traces[0])) == traced[1] - traced[0] + 1


def test_a_run_of_two_steps_is_told_that_there_is_no_profile():
    told, *_ = profiled(Ranks(), 5, {"schedule": {"steps": 2}})
    assert [message["kind"] for message in told] == ["no_profile"] and "needs 2 steps before it" in told[0]["why"]


def test_after_a_restart_there_is_no_second_trace_but_for_another_start_of_the_run(tmp_path):
    run = Store(str(tmp_path))
    assert not is_written(run, 1)
    run.write(name_of(3, 10), b"{}")
    assert is_written(run, 1) and is_written(run, 3) and not is_written(run, 4)
    assert (tmp_path / "tensorboard/profile/attempt3.11.pt.trace.json").exists()


def test_shares_are_of_the_whole_time():
    seconds = dict.fromkeys((*NAMES, OTHER), 0.0) | {"loss": 0.3, "input": 0.1, OTHER: 0.6}
    told = text(seconds, 4, 6, "here")
    assert "profile of steps 5 to 6 on worker 0, 500.0 ms each: input 10.0%" in told and "loss 30.0%" in told and "other 60.0%; trace: here" in told


def test_the_command_hands_the_number_of_steps_on(tmp_path, monkeypatch, capsys):
    with mock.patch("moco_ray.launch.pretrain") as pretrain:
        (tmp_path / "a.toml").write_text("[schedule]\nsteps = 30\n")
        assert main(["pretrain", str(tmp_path / "a.toml"), "--data", "x", "--profile", "20", "--storage", str(tmp_path)]) == 0
    assert pretrain.call_args.args[-1] == 20
