"""The written record: each step once, whoever computes it again, in a folder and in object storage."""

import asyncio
import json
import resource
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moco_ray.board import Mailbox
from moco_ray.data.batch import BadRow
from moco_ray.data.storage import Store
from moco_ray.errors import UserError
from moco_ray.meter import slow_rank
from moco_ray.monitor import EVENT_FILE_BYTES, Journal, read_metrics
from tests import synthetic


def entry(step: int, loss: float | None = None) -> dict:
    return {"step": step, "loss": step / 10 if loss is None else loss, "chance_loss": 5.0, "top1": 0.5}


@pytest.fixture
def plan():
    return synthetic.plan(synthetic.recipe())


@pytest.fixture(params=["folder", "object storage"])
def run(request, tmp_path) -> Store:
    """A run folder that is appended in place, or one of an object storage, which can only be written whole."""
    return Store(str(tmp_path)) if request.param == "folder" else Store(f"memory://{tmp_path}")


def lines(run: Store, name: str) -> list[dict]:
    return [json.loads(line) for line in run.read(name).decode().splitlines()] if run.size(name) is not None else []


def points(run: Store, folder: Path, tag: str) -> list[tuple[int, float]]:
    """What TensorBoard shows, from the files that the storage has."""
    for found in run.below("tensorboard").list():
        target = folder / "seen" / found.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(run.read(f"tensorboard/{found.name}"))
    shown = EventAccumulator(str(folder / "seen"), size_guidance={"scalars": 0}).Reload()
    return [(event.step, round(event.value, 3)) for event in shown.Scalars(tag)]


def test_a_step_that_is_computed_again_is_written_once_and_the_curve_never_goes_back(run, plan, tmp_path):
    journal = Journal(run, plan, 0)
    assert all(journal.record(entry(step), []) for step in (1, 2, 3, 4))
    assert not journal.record(entry(3, loss=9.9), [])  # a restart from step 2
    assert not journal.record(entry(4, loss=9.9), [])
    assert journal.record(entry(5), [])
    journal.close()
    assert [e["step"] for e in lines(run, "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert points(run, tmp_path, "learning/loss") == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (5, 0.5)]


def test_an_evaluation_of_a_step_stands_beside_its_scalars_and_once_too(run, plan):
    journal = Journal(run, plan, 0)
    assert journal.record(entry(4), []) and journal.record({"step": 4, "knn_top1": 0.3}, [])
    assert not journal.record({"step": 4, "knn_top1": 0.3}, [])
    journal.close()
    assert [sorted(e)[0] for e in lines(run, "metrics.jsonl")] == ["chance_loss", "knn_top1"]


def test_another_driver_goes_on_where_one_died_and_tensorboard_has_every_step_once(run, plan, tmp_path):
    first = Journal(run, plan, 0)
    for step in range(1, 7):
        first.record(entry(step), [])
    first.sync()  # with the checkpoint of step 4; then the driver dies with step 6 written here, and TensorBoard's file or not
    second = Journal(run, plan, 4)
    assert second.last_step == 6
    assert not second.record(entry(5, loss=9.9), []) and second.record(entry(7), [])
    second.close()
    assert [e["step"] for e in lines(run, "metrics.jsonl")] == [1, 2, 3, 4, 5, 6, 7]
    assert points(run, tmp_path, "learning/loss") == [(s, s / 10) for s in range(1, 8)]


def test_points_that_tensorboard_has_and_the_lines_have_not_are_taken_back(tmp_path, plan):
    """A driver that died between the two; and the other way round."""
    run = Store(str(tmp_path))
    first = Journal(run, plan, 0)
    for step in range(1, 6):
        first.record(entry(step), [])
    first.close()
    kept = (tmp_path / "metrics.jsonl").read_text().splitlines()[:3]
    (tmp_path / "metrics.jsonl").write_text("\n".join(kept) + '\n{"step": 4, "lo')  # cut off in the middle of a line
    second = Journal(run, plan, 2)
    assert second.last_step == 3
    second.record(entry(4, loss=4.4), [])
    second.close()
    assert points(run, tmp_path, "learning/loss") == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 4.4)]
    assert [e["step"] for e in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


def test_bad_rows_of_a_step_are_listed_once_also_when_the_driver_died_between_the_two_files(tmp_path, plan):
    run, bad = Store(str(tmp_path)), [(0, BadRow(33, 7, "truncated", "a.jpg", "cut"))]  # row 33: of step 2
    journal = Journal(run, plan, 0)
    journal.record(entry(1), [])
    journal._append("quarantine.jsonl", [journal._quarantined(*bad[0])])  # and then it died
    again = Journal(run, plan, 0)
    again.record(entry(2), bad)
    assert not again.record(entry(2), bad)
    again.close()
    assert [(row["step"], row["source"]) for row in lines(run, "quarantine.jsonl")] == [(2, "a.jpg")]


def test_events_are_lines_and_tensorboard_text_and_their_counters_are_scalars(run, plan, tmp_path):
    journal = Journal(run, plan, 0)
    journal.event("continuing", 50, "lost node b: continuing with 2 workers", restarts=1, steps_recomputed=7, seconds_lost=0.0)
    journal.event("caught_up", 57, "back at step 57: 14.0 s lost", restarts=1, steps_recomputed=7, seconds_lost=14.0)
    journal.close()
    assert [(e["kind"], e["step"]) for e in lines(run, "events.jsonl")] == [("continuing", 50), ("caught_up", 57)]
    assert points(run, tmp_path, "system/steps_recomputed") == [(50, 7), (57, 7)]
    assert told(run, tmp_path) == [["50", "lost node b: continuing with 2 workers"], ["57", "back at step 57: 14.0 s lost"]]


def told(run: Store, folder: Path) -> list[list[str]]:
    """Step and words of each event in TensorBoard's newest text, the oldest first."""
    points(run, folder, "system/restarts")  # fetches
    shown = EventAccumulator(str(folder / "seen"), size_guidance={"tensors": 0}).Reload().Tensors("events/text_summary")
    assert [event.step for event in shown] == sorted(event.step for event in shown)
    rows = shown[-1].tensor_proto.string_val[0].decode().splitlines()[2:]
    return [[cell.strip() for cell in row.split("|")[2:4]] for row in reversed(rows)]


def test_the_story_stays_in_tensorboard_when_another_driver_goes_on_and_counters_never_go_back(run, plan, tmp_path):
    first = Journal(run, plan, 0)
    for step in range(1, 6):
        first.record(entry(step), [])
    first.event("saved", 2, "step 2 is safe")
    first.event("continuing", 2, "from step 2", restarts=1, steps_recomputed=3, seconds_lost=0.0)
    first.event("caught_up", 5, "back at step 5", restarts=1, steps_recomputed=3, seconds_lost=9.0)
    first.event("continuing", 2, "from step 2 a|b", restarts=2, steps_recomputed=6, seconds_lost=9.0)
    first.sync()
    second = Journal(run, plan, 2)
    second.event("started", 2, "1 worker from step 2", restarts=2, steps_recomputed=9, seconds_lost=9.0)
    second.record(entry(6), [])
    second.close()
    assert told(run, tmp_path) == [
        ["2", "step 2 is safe"], ["2", "from step 2"], ["5", "back at step 5"], ["2", "from step 2 a/b"],
        ["2", "1 worker from step 2"]]  # fmt: skip
    steps = [step for step, _ in points(run, tmp_path, "system/restarts")]
    assert steps == sorted(steps) and steps[-1] == 5


def test_a_storage_that_takes_nothing_for_a_while_loses_nothing(tmp_path, plan, monkeypatch):
    run = Store(f"memory://{tmp_path}")
    journal = Journal(run, plan, 0)
    journal.record(entry(1), [])
    with monkeypatch.context() as patch:
        patch.setattr(Store, "write", _refuse)
        with pytest.raises(UserError, match="no room"):
            journal.sync()
        patch.setattr("moco_ray.monitor.SYNC_SECONDS", 0.0)
        journal.sync_if_due()  # tries, and keeps it to itself
        journal.record(entry(2), [])
    journal.sync()
    assert [e["step"] for e in lines(run, "metrics.jsonl")] == [1, 2]
    folder = journal.folder
    journal.close()
    assert not folder.exists()


def test_a_line_that_cannot_be_written_leaves_none_of_itself_and_no_later_checkpoint_passes(tmp_path, plan):
    """A full disk, by a limit on the size of files."""
    run = Store(str(tmp_path))
    journal = Journal(run, plan, 0)
    journal.record({**entry(1), "long": "x" * (1 << 20)}, [])  # so that TensorBoard's file is below the limit
    size = (tmp_path / "metrics.jsonl").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))
    try:
        with pytest.raises(UserError, match="cannot write in .*make room"):
            journal.record(entry(2), [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "metrics.jsonl").stat().st_size == size
    with pytest.raises(UserError, match="cannot write in"):  # though there is room again: step 2 is not there
        journal.sync()
    journal.close()
    assert Journal(run, plan, 0).record(entry(2), [])


def test_once_the_run_is_another_s_nothing_is_written_any_more(run, plan):
    journal = Journal(run, plan, 0)
    journal.record(entry(1), [])
    journal.sync()
    journal.abandon(UserError("taken over"))
    journal.record(entry(2), [])
    with pytest.raises(UserError, match="taken over"):
        journal.sync()
    journal.close()
    assert [e["step"] for e in lines(run, "metrics.jsonl")] == [1]


def test_another_driver_knows_the_counters_of_the_one_before(run, plan):
    journal = Journal(run, plan, 0)
    journal.event("continuing", 50, "..", restarts=2, steps_recomputed=7, seconds_lost=1.5)
    journal.event("saved", 60, "..")
    journal.close()
    counters = Journal(run, plan, 0).counters
    assert (counters["restarts"], counters["steps_recomputed"], counters["seconds_lost"]) == (2, 7, 1.5)


def _refuse(self, name, content):
    raise UserError("no room")


def test_a_tensorboard_file_that_has_grown_is_followed_by_another_and_only_that_is_sent_again(tmp_path, plan, monkeypatch):
    run = Store(f"memory://{tmp_path}")
    journal, sent = Journal(run, plan, 0), []
    write = Store.write
    monkeypatch.setattr(Store, "write", lambda self, name, content: (sent.append(name), write(self, name, content)))
    journal.event("note", 1, "x" * (EVENT_FILE_BYTES + 1))
    journal.sync()
    sent.clear()
    for step in (2, 3):
        journal.record(entry(step), [])
    journal.sync()
    big = max(run.below("tensorboard").list(), key=lambda found: found.bytes)
    assert big.bytes > EVENT_FILE_BYTES and f"tensorboard/{big.name}" not in sent
    assert [name for name in sent if name.startswith("tensorboard/events")]
    journal.close()
    assert points(run, tmp_path, "learning/loss") == [(2, 0.2), (3, 0.3)]


@pytest.mark.parametrize("place", ["", "memory://"])
def test_who_has_lost_the_run_writes_nothing_more_into_it(tmp_path, plan, place):
    run, held = Store(f"{place}{tmp_path}"), [True]

    def confirm():
        if not held[0]:
            raise UserError("it is another's")

    journal = Journal(run, plan, 0, confirm)
    journal.record(entry(1), [])
    journal.sync()
    before, held[0] = run.read("metrics.jsonl"), False
    with pytest.raises(UserError, match="it is another's"):
        journal.record(entry(2), [])
        journal.event("note", 2, "x")
        journal.sync()
    assert run.read("metrics.jsonl") == before
    journal.close()
    assert run.read("metrics.jsonl") == before and run.size("events.jsonl") in (None, 0)


# --- the board, without Ray ---------------------------------------------------------------------------------------------


def test_whoever_speaks_for_an_older_attempt_is_not_heard_and_is_told_so():
    async def story():
        board = Mailbox(next_attempt=4)
        assert await board.begin() == 4
        assert await board.tell(4, 0, {"kind": "a"}) and await board.pulse(4, 0, 10) == {}
        assert await board.begin() == 5
        assert not await board.tell(4, 1, {"kind": "b"}) and await board.pulse(4, 1, 11) is None
        assert await board.flush(4, 2) == "superseded"
        await board.fail(4, UserError("of before"))
        assert await board.fatal() is None and await board.pulses() == {}
        assert [(m["kind"], m["attempt"]) for m in await board.take(0)] == [("a", 4)]

    asyncio.run(story())


def test_a_flush_returns_when_the_driver_has_written_what_was_told_before_it():
    async def story():
        board = Mailbox(next_attempt=1)
        await board.begin()
        waiting = asyncio.create_task(board.flush(1, 1))  # overtakes the message before it
        await asyncio.sleep(0.01)
        assert await board.take(0) == []
        await board.tell(1, 0, {"kind": "record"})
        record, flush = await board.take(0)
        assert record["kind"] == "record" and not waiting.done()
        assert await board.take(0) == [record, flush]  # until the driver says that it has them
        await board.flushed(flush["flush"], UserError("a full disk"))
        assert str(await waiting) == "a full disk"
        assert await board.take(flush["number"]) == []

    asyncio.run(story())


def test_pulses_bring_orders_back_and_the_end_once_there_is_a_fatal_error_of_which_the_first_stays():
    async def story():
        board = Mailbox(next_attempt=1)
        await board.begin()
        await board.pulse(1, 0, 7)
        await asyncio.sleep(0.05)
        pulse = (await board.pulses())[0]
        assert pulse.step == 7 and pulse.age_seconds >= 0.05
        await board.order({"save": "now"})
        assert await board.pulse(1, 0, 8) == {"save": "now"}
        await board.fail(1, UserError("first"))
        await board.stop(UserError("second"))
        assert str(await board.fatal()) == "first" and await board.pulse(1, 0, 9) is None

    asyncio.run(story())


def test_whoever_waits_for_an_order_hears_of_it_at_once_also_of_one_given_before():
    async def story():
        board = Mailbox(next_attempt=1)
        await board.begin()
        began, waiting = time.monotonic(), asyncio.create_task(board.changed(1, {}))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await board.order({"stop": "now"})
        await waiting
        await board.changed(1, {})
        assert time.monotonic() - began < 0.5  # and not after PULSE_SECONDS
        quiet = asyncio.create_task(board.changed(1, {"stop": "now"}))
        await asyncio.sleep(0.05)
        assert not quiet.done()
        quiet.cancel()

    asyncio.run(story())


@pytest.mark.parametrize(
    "shares,slow",
    [
        ([[0.0, 0.5], [0.0, 0.02], [0.0, 0.6]], 1),
        ([[0.0, 0.5], [0.4, 0.02]], 1),
        ([[0.0, 0.5], [0.0, 0.4]], None),  # all wait: the network
        ([[0.0, 0.1], [0.0, 0.0]], None),  # hardly anybody waits
        ([[0.0, 0.5], [0.0, 0.05], [0.0, 0.1]], None),  # two are slow: the plan, not one of them
        ([[0.9, 0.0]], None),
        ([[0.0, 0.55], [0.0, 0.2]], 1),  # gradients take a fifth of everybody's time
    ],
)
def test_a_rank_is_slow_if_it_waits_for_nobody_and_all_others_wait(shares, slow):
    found = slow_rank(shares)
    assert (found and found.rank) == slow
