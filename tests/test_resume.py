"""A run that was interrupted in mid-epoch and restored equals one that never stopped, bit for bit.

float32 here: equality is of bits, not of mathematics. What the loop leaves on disk is tested too.
"""

import json
import tomllib
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from moco_ray import checkpoint
from moco_ray.attempts import Attempt, register
from moco_ray.data import order
from moco_ray.data.batch import BadRow
from moco_ray.data.storage import Store
from moco_ray.errors import NonFinite, UserError
from moco_ray.learner import Learner
from moco_ray.meter import Meter
from moco_ray.monitor import NOT_REPRODUCIBLE, Journal, read_metrics
from moco_ray.plan import Plan, Workers
from moco_ray.ranks import Ranks
from moco_ray.recipe import Recipe
from moco_ray.run_folder import RunFolder
from moco_ray.train import Outputs, train
from moco_ray.worker import refuse_different_queues, restore
from tests import synthetic

CHANGES = {
    "encoder": {"precision": "float32"},
    "run": {"checkpoint_every_steps": 7, "log_every_steps": 3, "keep_checkpoints": 2},
    "optimizer": {"learning_rate": 0.05},
}
ABOUT = {"recipe_fingerprint": "r", "data_fingerprint": "d", "order_version": order.VERSION}
STOP = 12  # two steps past the checkpoint of step 7, in the second epoch of 9 steps


def attempt(ranks: Ranks, path: str, stop: int | None, new=synthetic.small_learner):
    """One attempt of a run in a folder, from its newest checkpoint; cut off after `stop` completed steps."""
    torch.set_num_threads(1)
    folder, recipe = RunFolder(Store(path)), synthetic.recipe(**CHANGES)
    plan, learner = synthetic.plan(recipe), new(recipe)
    restore(learner, folder, ABOUT | {"recipe_fingerprint": recipe.fingerprint()}, ranks)
    start = learner.step
    record, journal = recorder(folder.store, plan, ranks, start)
    rows = synthetic.batches(plan, ranks, start)
    if stop is not None:
        rows = (batch for _, batch in zip(range(start, stop), rows, strict=False))

    def save(learner):
        refuse_different_queues(learner, ranks)
        if ranks.is_first:
            about = ABOUT | {"recipe_fingerprint": recipe.fingerprint()}
            checkpoint.save(folder.store, learner.step, 1, checkpoint.pack(learner.state_dict(), about), about, keep=2)

    try:
        train(learner, rows, plan, ranks, Outputs(record, save, lambda learner: {}))
    except StopIteration:
        assert learner.step == stop
    if journal:
        journal.close()
    return start, synthetic.copy_state(learner.state_dict())


def recorder(run: Store, plan: Plan, ranks: Ranks, start: int) -> tuple[Callable, Journal | None]:
    """What a run does with its records, without a driver: rank 0 writes them down."""
    meter = Meter(plan, ranks, start)
    journal = Journal(run, plan, start) if ranks.is_first else None

    def record(entry, bad):
        entry = {**entry, **meter.rates(entry["step"])[0]}
        if journal:
            journal.record(entry, bad)

    return record, journal


def reproducible(path) -> list[dict]:
    return [{k: v for k, v in e.items() if k not in NOT_REPRODUCIBLE} for e in read_metrics(path / "metrics.jsonl")]


@pytest.mark.parametrize("world,new", [(1, "small"), (2, "small"), (3, "small"), (3, "wide")])
def test_interrupted_in_mid_epoch_and_resumed_equals_uninterrupted_bit_for_bit(pool, tmp_path, world, new):
    build = synthetic.small_learner if new == "small" else synthetic.wide_learner
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir(), parts.mkdir()
    straight = pool.run(world, attempt, str(whole), None, build)
    assert pool.run(world, attempt, str(parts), STOP, build)[0][0] == 0
    assert read_metrics(parts / "metrics.jsonl")[-1]["step"] == 12  # past the checkpoint: not written again on resume
    resumed = pool.run(world, attempt, str(parts), None, build)
    for (start, state), (_, expected) in zip(resumed, straight, strict=True):
        assert start == 7 and state["step"] == 20
        assert synthetic.identical(state, expected)  # parameters, statistics, momentum buffers, queue
    assert reproducible(parts) == reproducible(whole)
    assert [e["step"] for e in read_metrics(whole / "metrics.jsonl")] == [3, 6, 7, 9, 12, 14, 15, 18, 20]


def test_without_the_pass_that_teaches_ddp_its_buckets_three_ranks_would_not_resume_exactly(pool, tmp_path):
    """The negative control: says that the comparison above can fail. Needs several buckets."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir(), parts.mkdir()
    straight = pool.run(3, cold, str(whole), None)
    pool.run(3, cold, str(parts), STOP)
    resumed = pool.run(3, cold, str(parts), None)
    assert not synthetic.identical(resumed[0][1], straight[0][1])


def cold(ranks, path, stop):

    with mock.patch("moco_ray.train.warm_up", lambda *a: None):
        return attempt(ranks, path, stop, synthetic.wide_learner)


def test_a_resume_on_another_number_of_ranks_goes_on_with_the_same_mathematics(pool, tmp_path):
    changes = {"run": {"checkpoint_every_steps": 7}}
    expected = pool.run(1, straight_losses, changes, None)[0]
    state = pool.run(3, state_at, changes, 7)[0]
    for world in (1, 2):
        losses = pool.run(world, straight_losses, changes, state)[0]
        assert losses == pytest.approx(expected[7:], abs=1e-9)


def test_a_run_resumed_in_another_memory_format_goes_on_the_same():
    """torch's fused SGD pairs weights and momentum by their place in memory."""
    expected = straight_losses(Ranks(), {}, None)
    for first, second in (("channels_last", "contiguous"), ("contiguous", "channels_last")):
        state = state_at(Ranks(), {"run": {"memory_format": first, "checkpoint_every_steps": 7}}, 7)
        losses = straight_losses(Ranks(), {"run": {"memory_format": second}}, state)
        assert losses == pytest.approx(expected[7:], abs=1e-9)


def straight_losses(ranks, changes, state):
    return synthetic.run(ranks, synthetic.recipe(**changes), state)[0].losses()


def state_at(ranks, changes, step):
    return synthetic.run(ranks, synthetic.recipe(**changes), until=step)[0].states[step]


# --- a step that is not finite -------------------------------------------------------------------------------------


def blow_up(ranks: Ranks, how: str):
    """Train until a step is not finite; returns the message and whether the state is that of the step before."""
    torch.set_num_threads(1)
    recipe = synthetic.recipe(run={"checkpoint_every_steps": 1, "log_every_steps": 50, "keep_checkpoints": 99})
    plan, learner, log = synthetic.plan(recipe), synthetic.small_learner(recipe), synthetic.Log()
    rows = synthetic.batches(plan, ranks)
    if how == "loss":  # one row's crops are poisoned where the colour stage reads them
        from moco_ray.data.augment import colour_stage

        def poisoned(crops, positions, view, *rest):
            x = colour_stage(crops, positions, view, *rest)
            if view == 0 and rest[1] == 1:  # epoch 1 begins with step 9
                x[torch.from_numpy(positions == 32 + 18)] = float("nan")  # step 10, row 18
            return x

        patch = mock.patch("moco_ray.ahead.colour_stage", poisoned)
    else:
        from moco_ray.method.contrast import info_nce

        def steep(*arguments):
            contrast = info_nce(*arguments)
            if learner.step == 5 and ranks.rank == ranks.world - 1:
                contrast.loss.register_hook(lambda gradient: gradient * float("inf"))
            return contrast

        patch = mock.patch("moco_ray.train.info_nce", steep)
    with patch:
        try:
            train(learner, rows, plan, ranks, log.outputs())
        except NonFinite as error:
            now, before = learner.state_dict(), log.states[learner.step]
            for state in (now, before):
                del state["optimizer"]["param_groups"][0]["lr"]  # a function of the step, set before it
            return str(error), learner.step, synthetic.identical(now, before)
    return "it trained on", learner.step, False


@pytest.mark.parametrize("world", [1, 3])
def test_a_loss_that_is_not_finite_stops_all_ranks_names_the_rows_and_changes_nothing(pool, world):
    for message, step, unchanged in pool.run(world, blow_up, "loss"):
        assert step == 10 and "step 10 (epoch 1)" in message
        assert "positions 48, 49, 50, 51" in message  # the altered row's BatchNorm group
        assert unchanged


def test_a_gradient_that_is_not_finite_on_one_rank_stops_all_ranks_and_changes_nothing(pool):
    for message, step, unchanged in pool.run(3, blow_up, "gradient"):
        assert step == 5 and "step 5 (epoch 0)" in message and "the gradient was not" in message
        assert unchanged


# --- bad rows --------------------------------------------------------------------------------------------------------


def with_bad_rows(ranks: Ranks, path: str, fraction: float, count: int, log_every: int = 1):

    recipe = synthetic.recipe(
        data={"max_bad_rows_fraction": fraction}, schedule={"steps": 12}, run={"log_every_steps": log_every}
    )
    plan, learner = synthetic.plan(recipe), synthetic.small_learner(recipe)
    record, journal = recorder(Store(path), plan, ranks, 0)

    def rows():
        for batch in synthetic.batches(plan, ranks):
            position = int(batch.positions[0])
            bad = tuple(
                BadRow(position + i, 7, "truncated", f"a.jpg of rank {ranks.rank}", "cut") for i in range(count)
            )
            in_next_epoch = log_every > 1 and batch.epoch == 1 and position == 0
            yield batch._replace(bad=bad if batch.epoch == 0 and position < 40 else bad[:1] if in_next_epoch else ())

    try:
        train(learner, rows(), plan, ranks, Outputs(record, lambda learner: None, lambda learner: {}))
    except UserError as error:
        return str(error)
    finally:
        if journal:
            journal.close()
    return learner.bad_rows


def test_bad_rows_of_all_ranks_are_counted_for_the_epoch_and_listed_in_the_quarantine(pool, tmp_path):
    assert pool.run(2, with_bad_rows, str(tmp_path), 0.1, 2) == [6, 6]  # rank 0 at steps 0 and 1, rank 1 at step 0
    listed = [json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
    assert len(listed) == 6 and {row["source"] for row in listed} == {"a.jpg of rank 0", "a.jpg of rank 1"}
    counted = [entry["bad_rows"] for entry in read_metrics(tmp_path / "metrics.jsonl")]
    assert counted[:3] == [4, 6, 6] and counted[-1] == 0  # the second epoch counts anew


def test_too_many_bad_rows_in_an_epoch_stop_all_ranks(pool, tmp_path):
    messages = pool.run(2, with_bad_rows, str(tmp_path), 5 / 288, 2)
    assert len(set(messages)) == 1
    assert (
        "6 images of epoch 0" in messages[0] and "more than the 5" in messages[0] and "quarantine.jsonl" in messages[0]
    )


def test_too_many_bad_rows_are_seen_when_a_record_spans_the_end_of_their_epoch(pool, tmp_path):
    messages = pool.run(2, with_bad_rows, str(tmp_path), 5 / 288, 2, 50)
    assert "6 images of epoch 0" in messages[0] and messages[0] == messages[1]


# --- the run folder ------------------------------------------------------------------------------------------------


def test_a_resume_takes_the_number_of_workers_of_the_last_attempt(tmp_path):
    folder = RunFolder(Store(str(tmp_path)))
    assert str(folder.last_workers()) == "1"
    for number, asked in enumerate(("8", "2:3"), 1):
        register(folder.store, Attempt(number, 0, 3, asked=asked))
    assert folder.last_workers() == Workers(3, 2)


# --- checkpoint files --------------------------------------------------------------------------------------------------



def test_a_checkpoint_of_another_encoder_queue_recipe_or_data_set_is_refused():
    recipe = synthetic.recipe(encoder={"precision": "float32"})
    state = Learner.new(recipe).state_dict()
    other = synthetic.recipe(encoder={"precision": "float32", "backbone": "resnet18"})
    with pytest.raises(UserError, match=r"another encoder: backbone\.layer1\.1\.\S+ is absent there"):
        Learner.new(other).load_state_dict(state)
    with pytest.raises(UserError, match="queue is"):
        Learner.new(synthetic.recipe(encoder={"precision": "float32"}, contrast={"queue_keys": 99})).load_state_dict(
            state
        )
    with pytest.raises(UserError, match="state version"):
        Learner.new(recipe).load_state_dict({**state, "version": 0})
    with pytest.raises(UserError, match="recipe r"):
        checkpoint.refuse_other("x.pt", ABOUT, "other", "d")
    with pytest.raises(UserError, match="data set d"):
        checkpoint.refuse_other("x.pt", ABOUT, "r", "other")


def test_a_recipe_survives_its_toml_and_its_fingerprint_covers_what_is_computed():

    recipe = synthetic.recipe()
    assert Recipe.parse(tomllib.loads(recipe.toml())) == recipe
    for changes in (
        {"run": {"log_every_steps": 9}},
        {"data": {"uri": "/elsewhere"}},
        {"evaluation": {"neighbours": 5}},
    ):
        assert synthetic.recipe(**changes).fingerprint() == recipe.fingerprint()
    for changes in ({"run": {"seed": 1}}, {"augment": {"flip_probability": 0.1}}, {"data": {"image_column": "jpg"}}):
        changed = synthetic.recipe(**changes)
        assert changed.fingerprint() != recipe.fingerprint() and len(changed.differences(recipe)) == 1


def test_a_checkpoint_of_a_release_with_another_order_of_the_data_is_refused():
    about = {key: value for key, value in ABOUT.items() if key != "order_version"}  # as releases before 2 wrote it
    with pytest.raises(UserError, match="made by another release of moco_ray, which goes through the data in another order"):
        checkpoint.refuse_other("step-000000001.pt", about, "r", "d")
    checkpoint.refuse_other("step-000000001.pt", ABOUT, "r", "d")
