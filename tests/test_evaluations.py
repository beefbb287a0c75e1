"""Evaluations beside the training: a checkpoint judged by Ray tasks as the loop would judge it, and the driver's account of them."""

import tempfile
import time
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch

from moco_ray import checkpoint
from moco_ray.beside import describe_sets, evaluate_checkpoint
from moco_ray.data.prototypes import drawn_prototypes
from moco_ray.data.survey import build_manifest
from moco_ray.errors import UserError
from moco_ray.evaluate.features import labelled_sets, watch_knn
from moco_ray.evaluations import MOST_WAITING, Evaluations
from moco_ray.events import Events
from moco_ray.learner import Learner
from moco_ray.plan import Plan
from moco_ray.ranks import Ranks
from moco_ray.recipe import Recipe
from moco_ray.run_folder import RunFolder
from moco_ray.session import Helpers, Room
from moco_ray.standing import Best, Standing
from moco_ray.worker import about
from tests.synthetic import copy_state, identical

CPU = Helpers(2, False)
GPU = Helpers(1, True)  # of which this Ray has none


@pytest.fixture(scope="module")
def cluster():
    with tempfile.TemporaryDirectory(prefix="mr", ignore_cleanup_errors=True) as folder:
        ray.init(num_cpus=2, include_dashboard=False, _temp_dir=folder, object_store_memory=150 << 20, log_to_driver=False)
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    drawn_prototypes(folder, rows=300, test_rows=100)
    return folder


class Run:
    """A run folder with checkpoints of a learner that was never trained, whose statistics are not those of a new one."""

    def __init__(self, folder, data, steps=(), **evaluation):
        settings = {"bank_uri": f"{data}/train", "query_uri": f"{data}/test", "every_epochs": 1, "neighbours": 5, "resize_pixels": 32}
        self.recipe = Recipe.parse({
            "encoder": {"backbone": "resnet10", "feature_dim": 16}, "contrast": {"queue_keys": 40},
            "batch": {"global_batch_size": 16, "bn_group_size": 4}, "schedule": {"epochs": 30}, "augment": {"image_pixels": 32},
            "data": {"uri": f"{data}/train"}, "evaluation": settings | evaluation, "run": {"keep_checkpoints": 1},
        })  # fmt: skip
        manifest = build_manifest(f"{data}/train", "image")
        self.plan = Plan(self.recipe, manifest.rows)
        self.epoch = self.plan.steps_per_epoch
        self.folder = RunFolder.at(str(folder), "run")
        self.folder.create(self.recipe, self.plan, manifest)
        self.store, self.sets = self.folder.store, labelled_sets(self.recipe)
        self.about = about(self.recipe, manifest, self.plan)
        self.learner = Learner.new(self.recipe)
        for name, tensor in self.learner.f_q.named_buffers():
            if name.endswith("running_mean"):
                tensor.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
        for step in steps:
            self.save(step)

    def save(self, step: int, keep: int = 20) -> str:
        self.learner.step = step
        return checkpoint.save(self.store, step, 1, checkpoint.pack(self.learner.state_dict(), self.about), self.about, keep).name

    def evaluations(self, helpers=lambda: CPU, evaluated=()) -> Evaluations:
        return Evaluations(self.store, self.plan, self.sets, helpers, evaluated)

    def names(self) -> list[int]:
        return sorted(saved.step for saved in checkpoint.whole(self.store))


def ended(evaluations: Evaluations, seconds: float = 120):
    """The next outcome."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := evaluations.look():
            (outcome,) = found
            return outcome
        time.sleep(0.05)
    raise AssertionError("no evaluation ended")


def test_a_checkpoint_is_judged_as_the_loop_judges_it_and_nothing_of_it_changes(cluster, data, tmp_path, monkeypatch):
    run = Run(tmp_path, data)
    name = run.save(run.epoch)
    content, before = run.store.read(f"{name}.pt"), copy_state(run.learner.state_dict())
    inside = watch_knn(run.learner.f_q, run.sets, run.recipe, Ranks())
    assert identical(before, run.learner.state_dict())  # queue, key encoder, optimizer and step too
    described = []
    monkeypatch.setattr("moco_ray.beside.describe_sets", lambda *words: described.extend(found := describe_sets(*words)) or found)
    monkeypatch.setattr("moco_ray.beside.let_others_go_first", lambda: None)  # here this process is not a task of its own
    beside = evaluate_checkpoint(run.store.uri, name, run.sets, CPU, baseline=True)
    untrained = Learner.new(run.recipe)
    assert beside["knn_untrained"] == watch_knn(untrained.f_q, run.sets, run.recipe, Ranks())["knn_top1"] != beside["knn_top1"]
    assert beside["knn_top1"] == inside["knn_top1"] and beside["knn_left_out"] == 0 and beside["evaluation_seconds"] > 0
    assert 0.02 < beside["knn_top1"] < 0.9
    assert run.store.read(f"{name}.pt") == content
    (bank, queries, *_), labels = described, [np.concatenate([batch.labels.numpy() for batch in _images(one, run.recipe)]) for one in run.sets]
    assert np.array_equal(bank.labels.numpy(), labels[0]) and np.array_equal(queries.labels.numpy(), labels[1])  # rows in order


def _images(one, recipe):
    from moco_ray.data.stream import labelled_images

    return labelled_images(one.manifest, recipe, one.rows, 64)


def test_what_an_earlier_driver_left_undone_is_made_up_for_in_order_and_the_best_is_marked(cluster, data, tmp_path):
    run = Run(tmp_path, data)
    steps = [run.epoch, 2 * run.epoch, 3 * run.epoch]
    names = [run.save(step) for step in steps]
    run.save(steps[0] + 1)  # no evaluation is due there
    evaluations = run.evaluations(evaluated={steps[1]})
    assert evaluations.beside and evaluations.steps_waiting == [steps[0], steps[2]] and not evaluations.idle
    assert Standing.read(run.store) == Standing(None, (names[0], names[2]))
    first = ended(evaluations)
    assert first.step == steps[0] and first.entry["epoch"] == 1.0 and "knn_untrained" not in first.entry  # of this run it is known already
    assert evaluations.landed(first.entry) and evaluations.best == Best(names[0], steps[0], first.entry["knn_top1"])
    second = ended(evaluations)
    assert second.step == steps[2] and not evaluations.landed(second.entry)  # the same weights: no better
    assert evaluations.idle and Standing.read(run.store) == Standing(evaluations.best, ())


def test_one_that_takes_too_long_is_given_up_in_a_line_and_the_next_one_has_its_turn(cluster, data, tmp_path):
    run = Run(tmp_path, data, timeout_minutes=0.02)
    steps = [run.epoch, 2 * run.epoch]
    for step in steps:
        run.save(step)
    evaluations = run.evaluations()
    outcome = ended(evaluations, 30)
    assert outcome.step == steps[0] and outcome.entry is None and "did not end in 0.02 minutes" in outcome.why
    assert "evaluation.bank_rows" in outcome.why and evaluations.steps_waiting == [steps[1]]
    assert ended(evaluations, 30).step == steps[1] and evaluations.idle
    assert outcome.again and len(Standing.read(run.store).waiting) == 2 and run.evaluations().steps_waiting == steps  # the next driver's


def test_one_whose_actors_find_no_gpu_ends_in_a_line(cluster, data, tmp_path):
    run = Run(tmp_path, data, [18], timeout_minutes=0.2)
    assert run.epoch == 18
    outcome = ended(run.evaluations(lambda: GPU))
    assert outcome.entry is None and "\n" not in outcome.why and len(outcome.why) < 400 and "ray::" not in outcome.why


def test_a_checkpoint_that_is_gone_costs_its_evaluation_and_nothing_else(cluster, data, tmp_path):
    run = Run(tmp_path, data)
    name = run.save(run.epoch)
    evaluations = run.evaluations()
    run.store.delete(f"{name}.json")
    outcome = ended(evaluations)
    assert outcome.entry is None and f"{name}.pt is gone" in outcome.why and "\n" not in outcome.why
    assert evaluations.idle and evaluations.look() == [] and not outcome.again and Standing.read(run.store).waiting == ()


def fails(*_):
    def row(block):
        raise RuntimeError("a long story\nand its cause")
        yield block  # a generator, as those of an evaluation

    list(ray.data.range(1).map_batches(row).iter_rows())


def test_one_that_fails_says_the_cause_in_a_line_and_is_kept_for_the_next_driver(cluster, data, tmp_path, monkeypatch):
    run = Run(tmp_path, data)
    steps = [run.epoch, 2 * run.epoch]
    names = [run.save(step) for step in steps]
    monkeypatch.setattr("moco_ray.evaluations.evaluate_checkpoint", fails)
    evaluations = run.evaluations()
    outcome = ended(evaluations)
    assert outcome == (steps[0], None, "RuntimeError: and its cause", True) and evaluations.steps_waiting == [steps[1]]
    monkeypatch.undo()
    assert evaluations.took_seconds is evaluations.left_seconds is None
    evaluations.landed(ended(evaluations).entry)
    assert evaluations.idle and evaluations.took_seconds > 0 and evaluations.left_seconds == 0.0
    assert Standing.read(run.store).waiting == (names[0],)
    run.save(steps[1] + 1, keep=1)
    assert steps[0] in run.names()  # not pruned meanwhile
    again = run.evaluations(evaluated={steps[1]})
    assert again.steps_waiting == [steps[0]] and ended(again).entry["step"] == steps[0]
    told = []
    Events(lambda kind, step, text, **_: told.append(text), 0, {}).not_evaluated(*outcome[:1], *outcome[2:])
    assert told == [f"no kNN of step {steps[0]}: RuntimeError: and its cause; its checkpoint is kept, and `moco-ray resume` or the same command again makes up for it"]


def test_those_that_wait_and_the_best_one_are_not_pruned_and_the_oldest_is_given_up_when_too_many_wait(data, tmp_path):
    run = Run(tmp_path, data)
    evaluations = run.evaluations(lambda: CPU)
    for number in range(1, MOST_WAITING + 2):
        run.save(number * run.epoch, keep=1)
        evaluations.saved(number * run.epoch, 1)
    assert run.names() == [number * run.epoch for number in range(1, MOST_WAITING + 2)]
    assert evaluations.steps_waiting == [number * run.epoch for number in range(2, MOST_WAITING + 2)]
    evaluations.landed({"step": 3 * run.epoch, "knn_top1": 0.5})
    evaluations.landed({"step": 4 * run.epoch, "knn_top1": 0.4})
    run.save(20 * run.epoch, keep=1)
    assert run.names()[:2] == [2 * run.epoch, 3 * run.epoch] and 4 * run.epoch not in run.names() and run.epoch not in run.names()
    assert evaluations.best.step == 3 * run.epoch
    again = run.evaluations(lambda: None)  # the next driver has GPUs that training takes all: nothing waits any more
    assert not again.beside and again.idle and again.best.step == 3 * run.epoch
    run.save(21 * run.epoch, keep=1)
    assert run.names() == [3 * run.epoch, 21 * run.epoch]


def test_a_storage_that_is_unwell_neither_ends_the_run_nor_loses_the_account(data, tmp_path, monkeypatch):
    run = Run(tmp_path, data)
    evaluations = run.evaluations(lambda: CPU)
    name, unwell = run.save(run.epoch), [True]
    write = Standing.write

    def sometimes(standing, store):
        if unwell[0]:
            raise UserError("503")
        write(standing, store)

    monkeypatch.setattr(Standing, "write", sometimes)
    evaluations.saved(run.epoch, 1)
    assert Standing.read(run.store).waiting == () and evaluations.steps_waiting == [run.epoch]
    unwell[0] = False
    monkeypatch.setattr("moco_ray.evaluations.AGAIN_SECONDS", 0.0)
    monkeypatch.setattr("moco_ray.evaluations.ray.remote", lambda function: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: None)))
    assert evaluations.look() == [] and Standing.read(run.store).waiting == (name,)


def test_a_damaged_account_stops_pruning_and_names_the_file(data, tmp_path):
    run = Run(tmp_path, data)
    run.save(1)
    run.store.write("evaluations.json", b'{"best": 3}')
    run.save(2, keep=1)
    assert run.names() == [1, 2]
    with pytest.raises(UserError, match="evaluations.json is damaged .*remove it"):
        run.evaluations()


@pytest.mark.parametrize(
    "room, expected",
    [(Room(1, {"CPU": 1, "GPU": 1}, 2), Helpers(2, True)), (Room(1, {"CPU": 1, "GPU": 1}), None), (Room(1, {"CPU": 1}), Helpers(1, False))],
)
def test_helpers_are_the_gpus_left_over_or_a_few_processes_and_none_where_the_workers_take_all_gpus(cluster, room, expected):
    assert room.helpers() == expected
