"""`moco-ray runs` and `moco-ray watch` on run folders made by hand: what is listed, what is removed and what never is, what is drawn."""

import io
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moco_ray import attempts, checkpoint
from moco_ray import watch as watch_module
from moco_ray.attempts import Attempt
from moco_ray.cli import main
from moco_ray.data.storage import Store
from moco_ray.errors import UserError
from moco_ray.frame import BLOCKS, frame, sparkline
from moco_ray.lease import Lease, _this_process
from moco_ray.progress import Progress
from moco_ray.record import Lines, Record, State
from moco_ray.runs import list_runs, watched
from moco_ray.standing import Best, Standing
from moco_ray.words import age, duration, size
from tests.object_stores import filled, use
from tests.run_folders import (
    BEGAN,
    checkpoints,
    entry,
    evaluation,
    event,
    health,
    lease,
    make_run,
    verdict,
    write_lines,
)


@pytest.fixture
def storage(tmp_path) -> Store:
    return Store(str(tmp_path / "runs"))


def command(capsys, *words: str, code: int = 0) -> str:
    """What the command prints; of a mistake the one line of it."""
    assert main(list(words)) == code, capsys.readouterr().err
    out, err = capsys.readouterr()
    if code:
        assert len(err.strip().splitlines()) == 1, err
    return err if code else out


def names(run: Store) -> list[str]:
    return [entry.name for entry in run.below("checkpoints").list()]


def loads(run: Store) -> int:
    """The step that the next start would go on from."""
    return checkpoint.load_newest(run, lambda text: None, lambda saved: None)[0].step


def damage(run: Store, saved: checkpoint.Saved) -> None:
    """Other bytes, as many as before: only reading them shows it."""
    content = run.read(f"{saved.name}.pt")
    run.write(f"{saved.name}.pt", content[:-20] + bytes(20 * [7]))


# Reading a record


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_of_a_growing_file_only_what_grew_is_read_and_a_torn_line_waits_for_its_end(where, tmp_path, monkeypatch):
    run = Store(str(tmp_path)) if where == "disk" else Store(f"memory://{tmp_path}")
    lines, starts = Lines(run, "metrics.jsonl"), []
    assert lines.read() == 0 and lines.entries == []  # not written yet
    many = [entry(step) for step in range(1, 200)]
    write_lines(run, "metrics.jsonl", many, torn='{"step": 200, "lo')
    assert lines.read() == 199 and lines.unreadable == 0
    whole = run.read("metrics.jsonl")
    read = Store.read
    monkeypatch.setattr(Store, "read", lambda self, name, start=0, stop=None: starts.append(start) or read(self, name, start, stop))
    run.write("metrics.jsonl", whole + b'ss": 1.0}\n' + json.dumps(entry(201)).encode() + b"\n")
    assert lines.read() == 2 and [e["step"] for e in lines.entries] == list(range(1, 202))
    assert starts[0] > len(whole) - 200
    assert lines.read() == 0


def test_a_file_that_was_repaired_or_replaced_is_read_anew(storage):
    run = storage.below("one")
    write_lines(run, "metrics.jsonl", [entry(step) for step in range(1, 9)])
    lines = Lines(run, "metrics.jsonl")
    lines.read()
    for count in (5, 30):  # shorter; longer, and other from the start
        write_lines(run, "metrics.jsonl", [entry(step, loss=float(count)) for step in range(1, count)])
        lines.read()
        assert [(e["step"], e["loss"]) for e in lines.entries] == [(step, count) for step in range(1, count)]


def test_lines_that_are_none_are_counted_and_left_out(storage):
    run = storage.below("one")
    run.write("events.jsonl", b'{"step": 1}\n{"ste\n[1]\n{"text": "x"}\n{"step": 2}\n{"step": Infinity}\n')
    lines = Lines(run, "events.jsonl")
    assert lines.read() == 2 and [e["step"] for e in lines.entries] == [1, 2] and lines.unreadable == 4


@pytest.mark.parametrize(
    ("name", "line"),
    [
        *(("metrics.jsonl", line) for line in ('{"step": "13", "loss": 1.0}', '{"step": 2.5, "loss": 1.0}', '{"step": 13, "loss": null}', '{"step": 13, "loss": "x"}', "[1]")),
        *(("events.jsonl", line) for line in ('{"step": 13, "kind": ["a"]}', '{"step": 13, "wall_time": 1e30}', '{"step": 13, "restarts": "x"}', '{"step": 13, "text": null}')),
    ],
)
def test_a_line_of_what_no_run_writes_stops_no_command(storage, name, line, capsys):
    run = make_run(storage, "a")
    write_lines(run, "events.jsonl", [event("saved", 12)])
    run.write(name, run.read(name) + line.encode() + b"\n")
    for words in (["runs", str(storage.uri)], ["watch", run.place(""), "--once"], ["doctor", run.place("")]):
        assert main(words) == 0, capsys.readouterr()
    assert "1 line of the record that cannot be read" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["{", "[]", '{"state": 7}', '{"verdicts": [{"name": 5}]}', '{"verdicts": [{"name": "x", "step": "y"}]}'])
def test_a_damaged_health_json_is_named_with_its_cure_and_hides_no_other_run(storage, content, capsys):
    run = make_run(storage, "a")
    make_run(storage, "b")
    run.write("health.json", content.encode())
    assert [main(words) for words in (["runs", str(storage.uri)], ["watch", run.place(""), "--once"], ["doctor", run.place("")])] == [0, 2, 2]
    shown = capsys.readouterr()
    assert "unreadable" in shown.out and "b " in shown.out and shown.err.count("remove it: the run writes it anew") == 2
    run.delete("health.json")
    assert main(["doctor", run.place("")]) == 0


def test_of_a_long_record_the_end_is_read(storage, monkeypatch):
    monkeypatch.setattr("moco_ray.record.END_BYTES", 2000)
    run = make_run(storage, "long", steps=500, total=500)
    record = Record.of(run.uri, end=True)
    found = [e["step"] for e in record.metrics.entries]
    assert found == list(range(found[0], 501)) and 2 <= len(found) < 10 and record.metrics.cut and record.metrics.unreadable == 0
    write_lines(run, "metrics.jsonl", [entry(step) for step in range(1, 503)])
    assert Record.of(run.uri).metrics.entries[-1]["step"] == 502  # all of it, where that is asked for


# How a run stands


def state(run: Store, silent: float | None = None) -> State:
    return Record.of(run.uri).state(silent)


def test_a_run_is_finished_with_the_checkpoint_of_its_last_step_and_stopped_without(storage):
    run = make_run(storage, "one", steps=20, total=20)
    assert state(run) == State("finished")  # an earlier release, without events or lease
    write_lines(run, "events.jsonl", [event("started", 0), event("saved", 10)])
    lease(run, released=True)
    assert state(run) == State("stopped")
    write_lines(run, "events.jsonl", [event("started", 0), event("saved", 20)])
    assert state(run) == State("finished")


def test_a_run_has_failed_if_workers_were_lost_and_nothing_went_on(storage):
    run = make_run(storage, "one")
    lease(run, released=True)
    story = [event("started", 0), event("worker_lost", 5, "worker 1 died; step 5 was reached")]
    write_lines(run, "events.jsonl", story)
    assert state(run) == State("failed", "worker 1 died; step 5 was reached")
    write_lines(run, "events.jsonl", [*story, event("continuing", 0)])
    assert state(run) == State("stopped")


def test_a_driver_of_this_machine_is_alive_or_not_and_one_elsewhere_is_watched(storage):
    run = make_run(storage, "one")
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    here = _this_process()
    lease(run, **here)
    assert state(run).word == "running" and state(run, 1000.0).word == "running"
    ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
    lease(run, **here | {"pid": process.pid, "process_start": ticks, "holder": "the other"})
    assert state(run) == State("running", "by the other")
    process.communicate(b"\n")
    assert state(run) == State("failed", "the other carried it and has ended")
    lease(run)
    assert state(run).word == "running"  # seen to change
    assert state(run, 12.0) == State("silent", "process 7 on elsewhere carried it, and was not heard of for the last 12 s")
    assert state(run, 31.0).word == "failed"


def test_watching_a_lease_ends_when_it_changes(storage):
    moving, still = make_run(storage, "moving"), make_run(storage, "still")
    fast = {"beat_seconds": 0.2, "expires_seconds": 60.0, "settle_seconds": 0.1}
    with Lease.acquire(moving, print, **fast) as held:
        held._facts |= {"boot": "another machine"}  # from the next beat on
        time.sleep(0.5)
        lease(still)
        records = [Record.of(run.uri) for run in (moving, still)]
        assert [record.sign.alive for record in records] == [None, None]
        found = watched(records, 1.5)
    assert found[moving.uri] is None and found[still.uri] >= 1.0
    assert [record.state(found[record.folder.place]).word for record in records] == ["running", "silent"]


# The list


def test_the_list_tells_of_each_run_how_it_stands_and_what_was_raised(storage, capsys):
    done = make_run(storage, "done", steps=20)
    write_lines(done, "metrics.jsonl", [entry(step) for step in range(1, 21)] + [evaluation(20, 0.5), evaluation(10, 0.7)])
    lease(done, released=True)
    health(done, 20, verdict(), verdict("input_bound"))
    empty = make_run(storage, "empty", steps=0)
    storage.write("other/data.bin", b"0" * 5000)  # no run
    listed = {run.name: run for run in list_runs(storage.uri)}
    assert list(listed) == ["done", "empty"]
    one = listed["done"]
    assert (one.state, one.step, one.total_steps, one.knn_last, one.knn_best) == ("finished", 20, 20, 0.5, 0.7)
    assert one.loss == pytest.approx(math.log(101) - 2) and one.verdicts == ("stale_dictionary", "input_bound")
    assert one.bytes == sum(each.bytes for each in done.list()) and one.written_at == BEGAN + 10  # of the line that was written last
    assert listed["empty"][:4] == ("empty", "stopped", "", 0) and listed["empty"].loss is None
    table = command(capsys, "runs", storage.uri).splitlines()
    assert len(table) == 3 and "20/20" in table[1] and "50.0 %  70.0 %" in table[1] and table[1].endswith("stale dictionary, input bound")
    assert table[2].split()[:5] == ["empty", "stopped", "0/20", "-", "-"] and size(sum(each.bytes for each in empty.list())) in table[2]
    as_json = json.loads(command(capsys, "runs", storage.uri, "--json"))
    assert [run["name"] for run in as_json] == ["done", "empty"] and as_json[0]["health"] == "ill"


def test_the_list_tells_the_step_that_is_safe_where_it_is_another_than_the_one_reached(storage, capsys):
    for name, saved in (("behind", [event("saved", 4), event("saved", 8)]), ("none", [event("started", 0)]), ("whole", [event("saved", 12)]), ("old", [])):
        run = make_run(storage, name)
        write_lines(run, "events.jsonl", saved)
        lease(run, released=True)
    table = [line.split() for line in command(capsys, "runs", storage.uri).splitlines()]
    assert " ".join(table[0]).startswith("run state step safe at loss")
    assert [line[:4] for line in table[1:]] == [[name, "stopped", "12/20", safe] for name, safe in (("behind", "8"), ("none", "0"), ("old", "-"), ("whole", "-"))]
    as_json = json.loads(command(capsys, "runs", storage.uri, "--json"))
    assert [run["safe_step"] for run in as_json] == [8, 0, None, 12]


def test_the_log_and_watch_tell_the_same_time_left_also_after_a_restart_on_other_workers(storage):
    run = make_run(storage, "one", total=40)
    plan, told, written = Record.of(run.uri).plan, io.StringIO(), []
    progress = Progress(plan, 0, told)
    rates = [50.0, 400.0, 90.0, 100.0, 110.0, 80.0, 120.0, 95.0, 105.0, 100.0, 100.0, 30.0]
    story = [(step, rate, 1) for step, rate in enumerate(rates, 1)] + [(11, 20.0, 2), (12, 25.0, 2), (13, 10.0, 2), (14, 12.0, 2)]
    for step, rate, attempt in story:
        line = entry(step, images_per_second=rate, attempt=attempt)
        new = step > len(written)
        if new:
            written.append(line)
            write_lines(run, "metrics.jsonl", written)
        progress._last_line = -math.inf
        progress.show(line, new)
        said = told.getvalue().splitlines()[-1]
        if new:
            text = "\n".join(line.text for line in frame(Record.of(run.uri), State("running"), BEGAN, 120))
            (left,) = re.findall(r"([\d:]+) left", text)
            assert f" {left} left" in said, (step, said, text)
    assert f" {duration(26 * plan.recipe.batch.global_batch_size / 12)} left" in said  # of the new workers alone


def test_a_loss_that_is_not_finite_is_null_in_json(storage, capsys):
    write_lines(make_run(storage, "one"), "metrics.jsonl", [entry(1, loss=math.nan)])
    assert json.loads(command(capsys, "runs", storage.uri, "--json"))[0]["loss"] is None


def test_the_best_knn_of_before_what_was_read_is_known_from_the_evaluations_account(storage, monkeypatch):
    run = make_run(storage, "one")
    Standing(Best("checkpoints/step-000000004.a000001", 4, 0.9)).write(run)
    write_lines(run, "metrics.jsonl", [entry(12), evaluation(12, 0.4)])
    assert list_runs(storage.uri)[0][7:9] == (0.4, 0.9)


def test_a_folder_that_may_not_be_listed_hides_no_other_run(storage, monkeypatch, capsys):
    make_run(storage, "good")
    make_run(storage, "theirs")
    whole = Store.list

    def refused(store):
        if "theirs" in store.place(""):
            raise UserError("theirs cannot be listed (Permission denied); repair its permissions")
        return whole(store)

    monkeypatch.setattr(Store, "list", refused)
    text = command(capsys, "runs", storage.uri)
    assert "good    stopped" in text and "theirs  unreadable" in text and "Permission denied" in text


def test_the_list_holds_of_each_run_its_evaluations_and_its_last_lines_alone(storage, monkeypatch):
    run, held = make_run(storage, "a", steps=1, total=3000), []
    write_lines(run, "metrics.jsonl", [evaluation(9, 0.5), *(entry(step) for step in range(10, 2000)), evaluation(1995, 0.4)])
    monkeypatch.setattr("moco_ray.runs.watched", lambda records: held.extend(records) or {})
    (listed,) = list_runs(storage.uri)
    assert (listed.step, listed.knn_last, listed.knn_best) == (1999, 0.4, 0.5) and listed.loss == pytest.approx(entry(1999)["loss"])
    assert len(held[0].metrics.entries) < 100  # of a long one 30 MB, and there may be hundreds


@pytest.mark.parametrize("name,content", [("plan.json", b"{"), ("plan.json", b"[]"), ("run.json", b"\xff"), ("health.json", b'{"verdicts": 3}'), ("evaluations.json", b"{")])
def test_a_run_that_cannot_be_read_is_listed_as_that_and_hides_no_other(storage, name, content, capsys):
    make_run(storage, "good")
    make_run(storage, "bad").write(name, content)
    text = command(capsys, "runs", storage.uri)
    assert "bad   unreadable" in text and f"bad/{name} is damaged" in text and "good  stopped" in text


def test_a_storage_without_runs_is_a_mistake_with_its_cure(storage, capsys):
    assert "there is nothing at" in command(capsys, "runs", storage.uri, code=2)
    storage.write("images/a.png", b"x")
    assert "no run lies in" in command(capsys, "runs", storage.uri, code=2)
    run = make_run(storage, "one")
    assert "is a run itself" in command(capsys, "runs", run.uri, code=2)
    assert "--prune" in command(capsys, "runs", storage.uri, "--yes", code=2)
    assert "--json" in command(capsys, "runs", storage.uri, "--json", "--prune", "one", code=2)


# Comparing


def test_a_comparison_shows_recipe_data_code_and_curves_side_by_side(storage, capsys):
    one = make_run(storage, "one", steps=20)
    other = make_run(storage, "other", steps=12, contrast={"key_momentum": 0.9, "temperature": 0.1}, run={"log_every_steps": 2}, rows=320)
    write_lines(one, "metrics.jsonl", [entry(step) for step in range(1, 21)] + [evaluation(10, 0.61)])
    write_lines(other, "metrics.jsonl", [entry(step, loss=9.5) for step in range(2, 13, 2)])
    attempts.register(other, Attempt(1, 0, 2, code={"git_commit": "fedcba9876543210", "git_dirty": True}))
    text = command(capsys, "runs", storage.uri, "--compare", "one", "other")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "contrast.key_momentum 0.99 0.9" in lines and "contrast.temperature 0.2 0.1" in lines
    assert "run.log_every_steps 1 2 (changes no number of the training)" in lines
    assert not any(line.startswith("contrast.queue_keys") for line in lines)
    assert "data set d, 300 rows d, 320 rows" in lines and "git commit abc123 abc123, fedcba987654 (changed)" in lines
    assert f"12 {math.log(101) - 1.2:.3f} 9.500 12.0% 12.0% 112 112" in lines
    table = lines[lines.index("Training, at the same steps") + 2 : lines.index("kNN") - 1]
    assert [line.split()[0] for line in table] == ["2", "4", "6", "8", "10", "12"]
    assert "10 61.0% -" in lines


def test_a_comparison_of_a_run_with_itself_or_without_metrics_says_so(storage, capsys):
    make_run(storage, "one", steps=0)
    text = command(capsys, "runs", storage.uri, "--compare", "one", "one")
    assert "the same in every value" in text and "no step was logged by both" in text and "neither was evaluated" in text
    assert "has no run 'two'; there are one" in command(capsys, "runs", storage.uri, "--compare", "one", "two", code=2)


# Removing


@pytest.fixture
def run(storage) -> Store:
    """Whole checkpoints of steps 4, 8, 12 and 16, none evaluated; let go."""
    run = make_run(storage, "one", steps=16)
    checkpoints(run, 4, 8, 12, 16)
    lease(run, released=True)
    return run


def test_pruning_leaves_the_newest_checkpoint_and_the_best_and_everything_else(run, storage, capsys):
    Standing(Best(checkpoint.name_of(8, 1), 8, 0.9)).write(run)
    before = {entry.name: run.read(entry.name) for entry in run.list()}
    text = command(capsys, "runs", storage.uri, "--prune", "one", "--yes")
    assert "stays: the checkpoint of step 16, which was read back, and the best one or those to be evaluated, of step 8" in text
    assert "removed 4 files" in text and "step-000000004.a000001.pt  (older)" in text
    assert names(run) == [f"step-0000000{n}.a000001.{part}" for n in ("08", "16") for part in ("json", "pt")]
    assert loads(run) == 16
    kept = {name: content for name, content in before.items() if "step-000000004" not in name and "step-000000012" not in name}
    after = {entry.name: run.read(entry.name) for entry in run.list() if entry.name not in ("lease.json", "lock")}
    assert after == {name: content for name, content in kept.items() if name != "lease.json"}
    assert "nothing is superfluous" in command(capsys, "runs", storage.uri, "--prune", "one", "--yes")


def test_a_checkpoint_that_waits_for_its_evaluation_stays(run, storage, capsys):
    Standing(None, (checkpoint.name_of(12, 1),)).write(run)
    command(capsys, "runs", storage.uri, "--prune", "one", "--yes")
    assert {name[:14] for name in names(run)} == {"step-000000012", "step-000000016"}


def test_where_the_newest_is_damaged_the_one_before_stays_and_loads(run, storage, capsys):
    saved = {one.step: one for one in checkpoint.whole(run)}
    damage(run, saved[16])
    run.write(f"{saved[12].name}.json", b"{")
    assert loads(run) == 8
    text = command(capsys, "runs", storage.uri, "--prune", "one", "--yes")
    assert "the checkpoint of step 8, which was read back" in text
    assert "step-000000016.a000001.pt  (damaged: its bytes are not those that were written)" in text
    assert names(run) == ["step-000000008.a000001.json", "step-000000008.a000001.pt"] and loads(run) == 8


def test_where_none_can_be_read_nothing_is_removed(run, storage, capsys):
    for one in checkpoint.whole(run):
        damage(run, one)
    before = names(run)
    assert "nothing is removed" in command(capsys, "runs", storage.uri, "--prune", "one", "--yes", code=2)
    assert names(run) == before


def test_a_checkpoint_of_a_later_release_stops_the_pruning(run, storage, capsys, monkeypatch):
    monkeypatch.setattr(checkpoint, "VERSION", 2)
    checkpoints(run, 20)
    monkeypatch.undo()
    before = names(run)
    assert "use the release that wrote it" in command(capsys, "runs", storage.uri, "--prune", "one", "--yes", code=2)
    assert names(run) == before


def test_what_an_attempt_wrote_after_another_replaced_it_is_superfluous_and_what_the_other_wrote_is_not(run, storage, capsys):
    attempts.register(run, Attempt(2, 8, 2))  # went on from step 8: 12 and 16 of the first are not believed
    assert loads(run) == 8
    text = command(capsys, "runs", storage.uri, "--prune", "one", "--yes")
    assert "another replaced" in text and names(run) == ["step-000000008.a000001.json", "step-000000008.a000001.pt"] and loads(run) == 8


def test_what_a_killed_process_left_is_removed_and_young_files_of_others_are_not(run, storage, capsys):
    folder = Path(run.uri)
    for name, old in (("checkpoints/.step-000000020.a000001.pt.7.part", False), (".evaluation.json.7.part", False), (".linear.json.7.part", True)):
        (folder / name).write_bytes(b"123")
        if old:
            os.utime(folder / name, (time.time() - 7200,) * 2)
    run.write("checkpoints/step-000000020.a000001.pt", b"no marker")
    text = command(capsys, "runs", storage.uri, "--prune", "one", "--yes")
    assert "step-000000020.a000001.pt  (never completed)" in text
    assert sorted(path.name for path in folder.rglob("*.part")) == [".evaluation.json.7.part"] and loads(run) == 16
    assert names(run) == ["step-000000016.a000001.json", "step-000000016.a000001.pt"]


def test_a_run_that_is_carried_is_not_touched(run, storage, capsys, monkeypatch):
    make_run(storage, "idle")
    before = names(run)
    monkeypatch.setattr("moco_ray.lease.EXPIRES_SECONDS", 30.0)
    with Lease.acquire(run, print, beat_seconds=0.2, expires_seconds=30.0, settle_seconds=0.1):
        capsys.readouterr()
        assert main(["runs", storage.uri, "--prune", "idle", "one", "--yes"]) == 2
        out, err = capsys.readouterr()
        assert "is being carried by process" in err and "wait for it, or stop it there" in err and "removed" not in out
    assert names(run) == before
    with Lease.acquire(storage.below("idle"), print):
        pass  # the other one was let go again


def test_a_run_that_another_takes_over_while_the_question_stands_keeps_the_rest(run, storage, capsys, monkeypatch):
    from moco_ray import tidy

    with tidy.tidying(run, print) as found:
        found._lease.lost.set()
        found._lease.reason = "it was taken over"
        with pytest.raises(UserError, match="taken over"):
            found.remove()
    assert len(names(run)) == 8


@pytest.mark.parametrize("answer,gone", [("y", True), ("YES", True), ("", False), ("n", False), ("j", False)])
def test_nothing_goes_without_a_yes(run, storage, capsys, monkeypatch, answer, gone):
    monkeypatch.setattr("builtins.input", lambda question: print(question) or answer)
    text = command(capsys, "runs", storage.uri, "--prune", "one")
    assert "remove 6 files, " in text and ("nothing was removed" in text) != gone and (len(names(run)) == 2) == gone


def test_where_nobody_can_answer_nothing_goes(run, storage, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert "--yes removes without asking" in command(capsys, "runs", storage.uri, "--prune", "one", code=2)
    assert "has no run 'two'" in command(capsys, "runs", storage.uri, "--prune", "one", "two", "--yes", code=2)
    assert len(names(run)) == 8


# Object storage


def test_runs_are_listed_pruned_and_watched_in_s3(moto, no_aws, monkeypatch, capsys):
    use(monkeypatch, moto)
    storage = Store.at(f"s3://{filled(moto, {})}/runs")
    run = make_run(storage, "one", steps=16)
    saved = checkpoints(run, 4, 8, 12)
    damage(run, saved[-1])
    lease(run, released=True)
    health(run, 12, verdict())
    assert "16/20" in command(capsys, "runs", storage.uri)
    command(capsys, "runs", storage.uri, "--prune", "one", "--yes")
    assert names(run) == ["step-000000008.a000001.json", "step-000000008.a000001.pt"] and loads(run) == 8
    shown = command(capsys, "watch", run.uri, "--once")
    assert shown.startswith("one · stopped · ill") and "step 16/20" in shown and "! stale dictionary (step 8)" in shown
    record = Record.of(run.uri)
    write_lines(run, "metrics.jsonl", [entry(step) for step in range(1, 19)])
    assert record.refreshed().step == 18


# Watching


def test_a_sparkline_is_the_means_of_its_stretches_from_lowest_to_highest():
    ramp = [(step, float(step)) for step in range(1, 9)]
    assert sparkline(ramp, 8, 1, 8) == BLOCKS
    assert sparkline(ramp, 4, 1, 8) == BLOCKS[0] + BLOCKS[2] + BLOCKS[5] + BLOCKS[7]  # 1.5, 3.5, 5.5, 7.5
    assert sparkline([(4, 0.0), (8, 1.0)], 8, 1, 8) == "   ▁▁▁▁█"  # what is rare stands until the next
    assert sparkline([(1, 2.0), (2, 2.0)], 2, 1, 2) == "▅▅" and sparkline([(1, math.nan), (2, 2.0)], 2, 1, 2) == "!▅"
    assert sparkline([], 5, 1, 2) == "" and sparkline(ramp, 0, 1, 8) == ""


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_no_line_of_a_frame_is_wider_than_the_terminal(storage, width):
    run = make_run(storage, "a-run-of-a-rather-long-name")
    write_lines(run, "events.jsonl", [event("saved", 10, "checkpoint of step 10 is safe " * 5)])
    health(run, 12, verdict())
    lines = frame(Record.of(run.uri), State("failed", "a long story " * 10), BEGAN + 100, width)
    assert max(len(line.text) for line in lines) <= width


def test_a_frame_tells_progress_speed_dictionary_safety_verdicts_and_events(storage):
    run = make_run(storage, "one")
    values = {"queue_top1": 0.4, "fresh_top1": 0.05, "drift": -0.5, "key_spread": 0.9}
    entries = [entry(step, images_per_second=64.0, **values) for step in range(1, 13)]
    write_lines(run, "metrics.jsonl", entries + [evaluation(9, 0.6), evaluation(12, 0.5)])
    write_lines(run, "events.jsonl", [event("started", 0, "2 workers from step 0"), event("saved", 10, "checkpoint of step 10 is safe")])
    health(run, 12, verdict())
    text = "\n".join(line.text for line in frame(Record.of(run.uri), State("running", "by me"), BEGAN + 130, 80))
    for words in (
        "one · running · ill", "step 12/20", "60%", "0:04 left", f"{math.log(101) - 1.2:.3f} (chance {math.log(101):.3f})", "queue top-1  40.0%",
        "fresh top-1  5.0% (queue 8.0 x)", "drift        cosine -0.500", "kNN          50.0% (best 60.0%)", "queue fill   100%", "images/s     64",
        "input wait   1.0%", "safe at step 10, 2 min ago; a failure now costs 2 steps", "! stale dictionary (step 8): queue top-1 is 8.7 times",
        "2 workers from step 0",
    ):  # fmt: skip
        assert words in text, f"{words!r} is not in\n{text}"


def test_a_run_without_a_step_is_watched_and_one_that_is_none_is_a_mistake(storage, capsys):
    run = make_run(storage, "one", steps=0)
    assert "no step is logged yet" in command(capsys, "watch", run.uri, "--once")
    assert "is no run folder" in command(capsys, "watch", storage.place("two"), "--once", code=2)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_watching_draws_what_came_and_ends_with_the_run_without_codes_where_there_is_no_terminal(storage, monkeypatch):
    run = make_run(storage, "one", steps=5)
    lease(run, **_this_process())
    looks = []

    def pause(seconds: float) -> None:
        looks.append(seconds)
        write_lines(run, "metrics.jsonl", [entry(step) for step in range(1, 5 * (len(looks) + 1) + 1)])
        if len(looks) == 3:
            write_lines(run, "events.jsonl", [event("saved", 20)])
            lease(run, released=True)

    monkeypatch.setattr(watch_module.time, "sleep", pause)
    for out in (io.StringIO(), Terminal()):
        looks.clear()
        lease(run, **_this_process())
        write_lines(run, "events.jsonl", [])
        write_lines(run, "metrics.jsonl", [entry(step) for step in range(1, 6)])
        watch_module.watch(run.uri, False, out)
        text = out.getvalue()
        assert looks == [2.0] * 3 and [f"step {n}/20" in text for n in (5, 10, 15, 20)] == [True] * 4 and "one · finished" in text
        assert ("\x1b" in text) == out.isatty()
    assert text.index("\x1b[?1049h") < text.index("\x1b[?1049l") < text.rindex("one · finished")


def test_a_reader_that_leaves_is_no_error(storage):
    run, program = make_run(storage, "a"), [sys.executable, "-m", "moco_ray"]
    for words in (["runs", storage.uri], ["doctor", run.place(""), "--json"]):
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run([*program, *words], stdout=writer, stderr=subprocess.PIPE, text=True)
        os.close(writer)
        assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c_leaves_quietly_and_the_terminal_as_it_was(storage, monkeypatch, capsys):
    run = make_run(storage, "one", steps=5)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch_module.time, "sleep", interrupt)
    out = Terminal()
    watch_module.watch(run.uri, False, out)
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h") == 1 and "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("seconds,words", [(-3, "0 s"), (59, "59 s"), (61, "1 min"), (7000, "117 min"), (7300, "2 h"), (180_000, "2 d")])
def test_ages_are_said_in_their_largest_unit(seconds, words):
    assert age(seconds) == words
