"""A run that loses workers, nodes and its driver is still the same run: real processes on a real Ray cluster.

One run per cluster suffers several failures, for each start costs half a minute of these two cores; every test says what one
of them must have led to. float64: equality is to 1e-8.
"""

import os
import signal
import subprocess
import time

import pytest

from tests.carried import Carried
from tests.clusters import Cluster, kill_tree, train_workers


class Story:
    """What was done to a run and when, for the tests that look at what came of it."""

    def __init__(self, run: Carried):
        self.run, self.moments = run, {}

    def now(self, what: str) -> None:
        self.moments[what] = time.time()


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """Two nodes and two workers: a worker is killed, then the driver, then a node is lost; one worker finishes."""
    with Cluster() as cluster:
        nodes = [cluster.add_node(2) for _ in range(2)]
        run = Carried(tmp_path_factory.mktemp("elastic"), cluster.environment, steps=48, every=6)
        story = Story(run)
        run.start("1:2")
        run.wait_for_step(8)
        run.wait(lambda: run.newest() is not None, 60, "the first checkpoint")  # it is written beside the steps
        story.now("worker killed")
        nodes[1].kill_train_worker()
        run.wait_for("caught_up")
        run.wait_for_step(14)
        run.wait_for_step(15)
        run.wait(lambda: run.newest().step >= 12, 60, "the checkpoint of step 12")
        story.now("driver killed")
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait()
        story.first_words = run.words
        before = len(run.attempts())
        run.start("1:2")
        run.wait(lambda: len(run.attempts()) > before, 150, "the second driver's workers")
        run.wait_for_step(max(run.metrics()[-1]["step"], run.attempts()[-1]["from_step"]) + 3)
        story.now("node killed")
        nodes[1].kill()
        run.finish()
        story.second_words = run.words
        yield story


def test_every_step_is_there_once_and_equals_a_run_that_nothing_ever_happened_to(story):
    story.run.refuse_other_than_undisturbed()


def test_a_killed_worker_is_told_and_the_run_goes_on_from_its_newest_checkpoint(story):
    assert story.run.events("worker_lost"), story.first_words
    first = story.run.events("continuing")[0]
    assert first["step"] >= 6 and "continuing with 2 workers from step" in first["text"]
    assert "computed again" in first["text"] and first["restarts"] == 1 and first["steps_recomputed"] >= 1
    back = story.run.events("caught_up")[0]
    assert back["step"] >= 8 and back["seconds_lost"] > 0
    for told in ("died; step", "continuing with 2 workers", "back at step", "is safe"):
        assert told in story.first_words
    assert "Traceback" not in story.first_words and "raylet" not in story.first_words


def test_after_its_driver_was_killed_the_same_command_goes_on(story):
    assert "taking over" in story.second_words and "has ended" in story.second_words
    assert "going on with it" in story.second_words
    attempts = story.run.attempts()
    assert [a["number"] for a in attempts] == list(range(1, len(attempts) + 1)) and len(attempts) >= 4
    third = attempts[2]
    assert third["workers"] == 2 and third["from_step"] >= 12 and third["asked"] == "1:2" and third["from_checkpoint"]


def test_a_lost_node_leaves_fewer_workers_and_the_same_run(story):
    last = story.run.attempts()[-1]
    assert last["workers"] == 1 and last["from_step"] >= story.run.attempts()[2]["from_step"] > 0
    assert "lost node node2" in story.second_words and "continuing with 1 worker (2 before)" in story.second_words
    assert {e["workers"] for e in story.run.metrics()} == {1, 2}
    seconds = story.run.next_step_seconds(story.moments["node killed"], last["number"] - 1)
    print(f"a lost node: {seconds:.1f} s to the next new step")
    assert seconds < 120  # a busy machine; README tells what an idle one takes


def test_checkpoints_tell_what_a_step_waited_and_only_the_newest_are_kept(story):
    for event in story.run.events("saved"):
        assert event["seconds_waited"] < event["seconds"] + 1 and "the step waited" in event["text"]
    kept = sorted(path.name for path in (story.run.run / "checkpoints").glob("*.json"))
    assert len(kept) == 3 and kept[-1].startswith("step-000000048.a")


# --- longer stories -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_nodes_that_go_with_notice_or_without_and_nodes_that_come_leave_the_same_run(tmp_path):
    """3 -> 2 by a node lost, 2 -> 4 by two that join, 4 -> 3 by one that is drained; and a second driver is refused."""
    with Cluster() as cluster:
        nodes = [cluster.add_node(2) for _ in range(3)]
        run = Carried(tmp_path, cluster.environment, steps=100, every=10)
        run.start("2:4")
        run.wait_for_step(12)
        other = subprocess.run(run.command("2:4"), cwd=run.folder, env={**os.environ, **cluster.environment},
                               capture_output=True, text=True, timeout=90)  # fmt: skip
        assert other.returncode == 2 and "is being carried by process" in other.stderr, other
        moment = time.time()
        nodes[2].kill()
        run.wait_for("caught_up")
        assert run.attempts()[-1]["workers"] == 2
        run.wait_for_step(run.metrics()[-1]["step"] + 2)
        print(f"a lost node, 3 to 2 workers: {run.next_step_seconds(moment, 1):.1f} s to the next new step")
        new = [cluster.add_node(2) for _ in range(2)]
        run.wait(lambda: run.attempts()[-1]["workers"] == 4, 180, "four workers")
        run.wait_for_step(run.metrics()[-1]["step"] + 3)
        before, moment = len(run.attempts()), time.time()
        new[0].drain(25)
        run.wait_for("saving", len(run.events("saving")) + 1, 60)
        run.wait(lambda: len(run.attempts()) > before, 180, "the workers that are left")
        last = run.attempts()[-1]
        assert last["workers"] == 3
        saved = [e["text"] for e in run.events("saving")]
        assert any("is taken away in" in text for text in saved), saved
        assert any("the last moment" in text for text in saved), saved
        run.wait_for_step(last["from_step"] + 1)
        drained = [e for e in run.events("continuing") if e["step"] == last["from_step"]][-1]
        assert "no step is lost" in drained["text"], drained
        print(f"a drained node: {run.next_step_seconds(moment + 25, last['number'] - 1):.1f} s from its end to the next step")
        run.finish()
        run.refuse_other_than_undisturbed()
        assert {e["workers"] for e in run.metrics()} >= {2, 3, 4}


@pytest.mark.slow
def test_a_run_whose_head_is_lost_stops_in_one_line_and_goes_on_on_another_cluster(tmp_path):
    with Cluster() as cluster:
        cluster.add_node(2)
        run = Carried(tmp_path, cluster.environment, steps=30, every=5)
        run.start("1:2")
        run.wait_for_step(8)
        moment = time.time()
        cluster.head.kill()
        code = run.process.wait(timeout=240)
        print(f"a lost head: {time.time() - moment:.1f} s until the driver stops")
        assert code == 2 and "the Ray cluster was lost" in run.words and "moco-ray resume" in run.words, (code, run.words)
        assert "Traceback" not in run.words
    with Cluster() as cluster:
        cluster.add_node(2)
        run.environment = cluster.environment
        run.start("1:2")
        run.finish()
        run.refuse_other_than_undisturbed()


@pytest.mark.slow
def test_a_worker_that_stands_still_is_named_and_given_up(tmp_path):
    with Cluster() as cluster:
        nodes = [cluster.add_node(2) for _ in range(2)]
        run = Carried(tmp_path, cluster.environment, steps=30, every=5)
        run.start("1:2")
        run.wait_for_step(8)
        (pid,) = nodes[1].train_workers()
        os.kill(pid, signal.SIGSTOP)
        moment = time.time()
        run.wait_for("continuing", seconds=180)
        print(f"a worker that stands still: {time.time() - moment:.1f} s until others go on")
        run.finish()
        assert any("has not been heard of" in event["text"] for event in run.events("silent")), run.words
        run.refuse_other_than_undisturbed()


@pytest.mark.slow
def test_a_run_of_one_machine_survives_a_killed_worker_too(tmp_path):
    """No cluster: the local Ray of the command itself, and a fixed number of workers."""
    run = Carried(tmp_path, {"RAY_ADDRESS": ""}, steps=20, every=5)
    run.start("2")
    run.wait_for_step(7)
    os.kill(train_workers(run.process.pid)[0], signal.SIGKILL)
    run.finish()
    assert run.events("worker_lost") and run.events("continuing")
    run.refuse_other_than_undisturbed()


def test_the_harness_ends_what_it_started():
    process = subprocess.Popen(["sh", "-c", "sleep 300 & sleep 300"])
    kill_tree(process)
    assert process.returncode == -signal.SIGKILL
