"""What becomes of a run when its object storage or its network fails it: the whole command, for real."""

import json
import os
import signal
import time

import pytest

from moco_ray import checkpoint
from moco_ray.data.storage import Store
from tests.carried import Carried
from tests.fault_proxy import FaultProxy
from tests.namespaces import Hosts
from tests.object_stores import rclone_server


@pytest.mark.slow
def test_a_cut_link_leaves_the_surviving_host_at_work_and_when_it_comes_back_the_run_grows(tmp_path):
    with Hosts(head_cpus=2, node_cpus=2) as hosts:
        run = Carried(tmp_path, hosts.environment, steps=90, every=10)

        def in_a(argv, env, **popen):
            return hosts.run_in_a(argv, env, **popen)

        run.start("1:2", run=in_a)
        run.wait_for_step(12)
        assert run.attempts()[-1]["workers"] == 2 and hosts.train_workers_in_b()
        hosts.link_down()
        moment = time.time()
        run.wait(lambda: run.attempts()[-1]["workers"] == 1, 120, "one worker")
        run.wait_for_step(run.metrics()[-1]["step"] + 2)
        print(f"a cut link: {run.next_step_seconds(moment, 1):.1f} s to the next new step")
        hosts.link_up()
        moment = time.time()
        run.wait(lambda: run.attempts()[-1]["workers"] == 2, 150, "two workers")
        print(f"the link is back: {time.time() - moment:.1f} s until two workers go on")
        run.finish()
        run.refuse_other_than_undisturbed()


@pytest.fixture
def in_s3(tmp_path):
    """A run whose folder and data lie in an S3 server behind a proxy that can fail: the run, and the proxy."""
    (tmp_path / "runs").mkdir()  # a bucket
    with rclone_server(tmp_path) as store, FaultProxy(store.endpoint) as proxy:
        environment = {**store.environment(), "AWS_ENDPOINT_URL": proxy.endpoint, "RAY_ADDRESS": ""}
        yield Carried(tmp_path, environment, steps=140, every=15, storage="s3://runs"), proxy


@pytest.mark.slow
def test_a_minute_without_storage_costs_checkpoints_and_nothing_else(in_s3):
    run, proxy = in_s3
    run.start("1", data="drawn/train")
    run.wait(lambda: len(run.events("saved")) > 0 and run.newest() is not None, 150, "a checkpoint in S3")
    proxy.fault("PUT", "", "503", times=None)
    proxy.fault("POST", "", "503", times=None)
    end = time.time() + 60

    def told() -> bool:  # a busy machine may not come to a save in a minute
        return "could not save the checkpoint" in run.words or time.time() > end + 240

    while (time.time() < end or not told()) and run.process.poll() is None:
        time.sleep(0.5)
    refused = proxy.outcomes("PUT").count("503") + proxy.outcomes("POST").count("503")
    proxy.clear()
    assert refused > 5, "the fault did not happen"
    run.finish()
    assert "could not save the checkpoint" in run.words and "Training goes on" in run.words
    run.refuse_other_than_undisturbed()


@pytest.mark.slow
def test_a_full_bucket_lost_access_or_expired_credentials_stop_the_run_which_goes_on_when_they_are_mended(in_s3):
    """Each time: what is safe stays, one line tells the cause and the cure, and the same command goes on."""
    run, proxy = in_s3
    for refusal, cure in (("full", "make room"), ("403", "check AWS_ACCESS_KEY_ID"), ("expired", "check AWS_ACCESS_KEY_ID")):
        before = run.newest().step if run.newest() else 0
        run.start("1", data="drawn/train")
        run.wait(lambda before=before: run.newest() is not None and run.newest().step > before, 150, "a checkpoint in S3")
        for method in ("PUT", "POST"):
            proxy.fault(method, "", refusal, times=None)
        code, last = run.process.wait(timeout=200), run.newest()
        assert refusal in proxy.outcomes("PUT") + proxy.outcomes("POST"), "the fault did not happen"
        proxy.clear()
        assert code == 2 and "4 checkpoints in a row could not be saved" in run.words and cure in run.words, run.words
        assert "Training goes on" in run.words and "Traceback" not in run.words
        assert checkpoint.load(Store(str(run.run)), last)[0]["step"] == last.step < run.steps
    run.start("1", data="drawn/train")
    run.finish()
    run.refuse_other_than_undisturbed()


@pytest.mark.slow
def test_a_driver_that_was_stopped_and_taken_over_wakes_up_and_writes_nothing_more(tmp_path):
    """As on a laptop that slept, or a machine that was paused: its process lives, and another has the run."""
    run = Carried(tmp_path, {"RAY_ADDRESS": ""}, steps=60, every=10)
    first = run.start("1")
    run.wait_for_step(12)
    os.kill(first.pid, signal.SIGSTOP)
    first_log, reached = run.log, run.metrics()[-1]["step"]
    second = run.start("1")
    run.wait(lambda: len(run.attempts()) == 2, 150, "the second driver's workers")
    assert "waiting up to 30 s" in run.words and "not heard of for 30 s" in run.words
    run.wait_for_step(reached + 1)
    os.kill(first.pid, signal.SIGCONT)
    assert first.wait(90) == 2, first_log.read_text()
    assert f"was taken over by process {second.pid}" in first_log.read_text() and "Traceback" not in first_log.read_text()
    run.finish()
    run.refuse_other_than_undisturbed()
    assert {e["attempt"] for e in run.metrics() if e["step"] > reached} == {2}


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_named_and_the_run_goes_on_from_the_one_before(tmp_path):
    run = Carried(tmp_path, {"RAY_ADDRESS": ""}, steps=30, every=5)
    run.start("1")
    run.wait_for_step(16)
    run.process.kill()
    run.process.wait()
    time.sleep(5)  # its workers outlive it for a moment, and may make one more checkpoint whole
    newest, before, *_ = checkpoint.whole(Store(str(run.run)))
    path = run.run / f"{newest.name}.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    run.start("1")
    run.finish()
    assert f"{newest.name}.pt is damaged" in run.words and f"using the one of step {before.step} before it" in run.words
    assert json.loads((run.run / "attempts" / "000002.json").read_text())["from_step"] == before.step
    run.refuse_other_than_undisturbed()
