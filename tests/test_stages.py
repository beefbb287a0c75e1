"""How far a command says that it is: a line now and then in a job's log, and a bar on a terminal. Without Ray."""

import io
import os
import re
import time
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from moco_ray import stages, words
from moco_ray.data.batch import BadRow
from moco_ray.data.stream import LabelledBatch
from moco_ray.desk import Desk
from moco_ray.evaluate.features import LabelledSet, describe_set, raw_pixels
from moco_ray.evaluate.sweep import Settings, sweep
from moco_ray.evaluate.table import Protocol, compare
from moco_ray.evaluate_run import described
from moco_ray.launch_probe import _Ear
from moco_ray.plan import Plan
from moco_ray.ranks import Ranks
from moco_ray.stages import Stages
from tests import synthetic


class Terminal(io.StringIO):
    def isatty(self):
        return True


def until(found, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not found() and time.monotonic() < end:
        time.sleep(0.01)


def test_a_line_tells_the_stage_how_far_and_how_long_and_comes_again_while_nothing_moves(monkeypatch):
    monkeypatch.setattr(stages, "LINE_SECONDS", 0.05)
    out = io.StringIO()
    with Stages(out) as at:
        at("reading", 2, 7, "files")
        until(lambda: out.getvalue().count("\n") > 2)  # nobody calls it meanwhile
        at("judging", 1, 4, "results", "raw pixels, kNN")
        until(lambda: "judging" in out.getvalue())
    text = out.getvalue()
    assert text.count("reading: 2 of 7 files, 0:00\n") >= 3 and "\r" not in text
    assert "judging: 1 of 4 results (raw pixels, kNN), 0:00\n" in text
    ended = out.getvalue()
    time.sleep(0.15)
    assert out.getvalue() == ended  # nor after the block


def test_a_stage_that_is_over_at_once_says_nothing_and_a_longer_one_its_end_and_the_time_left(monkeypatch):
    out = io.StringIO()
    with Stages(out) as at:
        at("reading", 7, 7, "files")
        assert out.getvalue() == ""
        monkeypatch.setattr(stages, "BRIEF_SECONDS", 0.0)
        at("features", 100, 1100, "images")
        at._began, at._next_line = time.monotonic() - 60, 0.0
        at("features", 600, 1100, "images")
        at("features", 1100, 1100, "images")
    assert out.getvalue().splitlines() == ["features: 600 of 1,100 images, 1:00, 1:00 left", "features: 1,100 of 1,100 images, 1:00"]


def test_a_terminal_gets_a_bar_for_each_stage_and_lines_above_it(monkeypatch):
    monkeypatch.setattr(stages, "BRIEF_SECONDS", 0.0)
    out = Terminal()
    with Stages(out) as at:
        at("starting Ray")
        at("features", 3, 9, "images")
        at.say("a line that stays")
    assert all(told in out.getvalue() for told in ("starting Ray", "features", "3/9", "a line that stays\n")) and "3 of 9" not in out.getvalue()


def read_of(manifest, recipe, rows, batch_rows, ranks):
    """As the stream gives them, of images without Ray; of each batch the first cannot be read."""
    for first in range(0, len(rows), batch_rows):
        own = torch.from_numpy(rows[first : first + batch_rows])
        yield LabelledBatch(torch.zeros(len(own) - 1, 4, 4, 3, dtype=torch.uint8), own[1:] % 2, own[1:], (BadRow(first, int(own[0]), "truncated", "file", "of no image"),))


def test_features_are_told_image_by_image_of_each_set_also_those_that_are_left_out(monkeypatch):
    monkeypatch.setattr(stages, "BRIEF_SECONDS", 0.0)
    monkeypatch.setattr("moco_ray.evaluate.features.labelled_images", read_of)
    recipe, sets = synthetic.recipe(), [LabelledSet(None, np.arange(rows)) for rows in (600, 40)]
    told, out = [], io.StringIO()
    describe_set(sets[0], {"raw": raw_pixels}, recipe, Ranks(), lambda done, total: told.append((done, total)))
    assert told == [(0, 600), (256, 600), (512, 600), (600, 600)]
    with Stages(out) as at:
        bank, queries = described(sets, {"raw": raw_pixels}, recipe, at)
        again = described(sets[:1], {"raw": raw_pixels}, recipe, lambda *_, **__: None)
    assert len(bank.labels) == 597 and len(queries.labels) == 39 and again[0] is again[1]
    assert re.findall(r"features of the (\w+): (\d+) of (\d+) images, ", out.getvalue()) == [("bank", "600", "600"), ("queries", "40", "40")]


def test_judging_tells_each_judge_of_each_description_and_a_sweep_its_epochs():
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(40) % 2
    x = torch.randn(40, 3, generator=generator) + y[:, None]
    told = []
    compare({"raw": (x, x), "trained": (x, x)}, y, y, Protocol.fitting(y, False), lambda *now: told.append(now))
    names = [f"{name}, {judge}" for name in ("raw", "trained") for judge in ("kNN", "few labels", "linear classifier")]
    assert told == [(number, 6, name) for number, name in enumerate(names)]
    told.clear()
    sweep(x, y, x, y, Settings((0.1, 1.0), epochs=3, batch_size=8), lambda *now: told.append(now))
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_training_on_labels_tells_the_step_at_work_and_its_epoch():
    told = []
    plan = Plan(synthetic.recipe(schedule={"epochs": 3, "steps": 0}), 330)  # ten steps of 32 an epoch
    ear = _Ear(None, plan, lambda *now: told.append(now))
    for step in (0, 1, 10, 11):
        ear._tell_step(step)
    assert told[0] == ("starting workers, reading the first images",) and plan.total_steps == 30
    assert told[1:] == [("training", step, 30, "steps", note) for step, note in [(0, "epoch 1 of 3"), (9, "epoch 1 of 3, then its test"), (10, "epoch 2 of 3")]]


def test_a_worker_s_pulse_carries_the_step_that_is_at_work():
    from moco_ray.probe_worker import _counted

    wire = SimpleNamespace(step=0)
    assert [(batch, wire.step) for batch in _counted(iter("ab"), wire, 20)] == [("a", 21), ("b", 22)]


def test_waiting_for_evaluations_says_how_many_are_left_how_long_and_what_ends_it(monkeypatch):
    monkeypatch.setattr("moco_ray.desk.LINE_SECONDS", 0.0)
    monkeypatch.setattr("moco_ray.desk.ray.get", lambda *_, **__: None)
    monkeypatch.setattr("moco_ray.desk.time.sleep", lambda _: done.pop())
    said, done, journal = [], [1, 2], SimpleNamespace(last_step=60, counters={})
    asked = mock.Mock(took_seconds=None, left_seconds=None, steps_waiting=[32, 60])
    type(asked).idle = mock.PropertyMock(side_effect=lambda: not done)
    desk = Desk(mock.Mock(), journal, SimpleNamespace(say=said.append), None, None, asked, None, None, None)
    desk.finish_evaluations()
    assert said == ["all steps are done; waiting for 2 evaluations (of step 32, 60). Ctrl-C ends it, and the same command again makes up for them"] * 2
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", '{"metadata": {"job_submission_id": "first-1"}}')
    asked.took_seconds, asked.left_seconds, asked.steps_waiting, done[:] = 75.0, 20.0, [60], [1]
    desk.finish_evaluations()
    line = "all steps are done; waiting for 1 evaluation (of step 60), about 0:20 left (the last took 1:15). `ray job stop first-1` ends it, and the same"
    assert said[2].startswith(line)


def test_a_line_that_nobody_can_read_any_more_ends_nothing():
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as left:
        words.note("one", left)
        words.note("two", left)  # from here on to nobody
    full = mock.Mock(write=mock.Mock(side_effect=OSError("No space left on device")))
    words.note("three", full)
    with pytest.raises(OSError, match="No space"):
        words.say("a result is not lost in silence", full)
