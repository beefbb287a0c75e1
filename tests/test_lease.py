"""One driver at a time: on a disk, on an S3 server that keeps conditions (moto) and on one that ignores them (rclone)."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import uuid

import pytest

from moco_ray import lease as lease_module
from moco_ray.data import conditional as conditional_module
from moco_ray.data import storage
from moco_ray.data.conditional import InS3, OnDisk, Unconditional, conditional
from moco_ray.data.storage import Store
from moco_ray.errors import UserError
from moco_ray.lease import Lease
from tests.fault_proxy import FaultProxy
from tests.object_stores import filled, use

FAST = {"beat_seconds": 0.1, "expires_seconds": 1.0, "settle_seconds": 0.3}
KIND = {"disk": OnDisk, "moto": InS3, "rclone": Unconditional}


@pytest.fixture(autouse=True)
def _short_pauses(no_aws, monkeypatch):
    monkeypatch.setattr(storage, "FIRST_PAUSE_SECONDS", 0.01)


@pytest.fixture(params=list(KIND))
def where(request) -> str:
    return request.param


@pytest.fixture
def run(where, request, tmp_path, monkeypatch) -> Store:
    if where in ("moto", "rclone"):
        server = request.getfixturevalue(where)
        use(monkeypatch, server)
        return Store.at(f"s3://{filled(server, {})}/50%25/run")
    return Store.at(str(tmp_path / "run"))


def message(call, *arguments, **named) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def stored(run: Store) -> dict:
    return json.loads(run.read("lease.json"))


def silent(lease: Lease) -> Lease:
    """As if its machine were gone: no beat comes, and nothing tells that its process has ended."""
    lease._ended.set()
    lease._thread.join()
    return lease


def until(condition, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


def wait_for_a_beat(run: Store) -> None:
    beat = stored(run)["beat"]
    until(lambda: stored(run)["beat"] > beat)


# The object itself


def test_an_object_is_replaced_only_by_who_knows_what_it_held(run, where):
    mine = conditional(run, "deep/x")
    assert type(mine) is KIND[where] and mine.certain == (where in ("disk", "moto"))
    assert (
        mine.read() is None
        and mine.replace(b"no", mine.replace(b"1", None)._replace(content=b"0", version='"0"')) is None
    )
    first = mine.read()
    assert first.content == b"1" and mine.replace(b"2", None) is None
    second = mine.replace(b"2", first)
    assert mine.replace(b"3", first) is None and mine.read() == second
    run.delete("deep/x")
    assert mine.replace(b"3", second) is None and mine.read() is None and mine.replace(b"4", None).content == b"4"
    assert [entry.name for entry in run.list() if entry.name != "lock"] == ["deep/x"], "nothing of the probe is left"


def test_many_at_once_and_each_adds_one(run, where):
    """Where the storage is certain no addition is lost."""
    if not KIND[where].certain:
        pytest.skip("nothing is promised here")
    conditional(run, "x").replace(b"0", None)

    def add() -> None:
        mine = conditional(run, "x")
        for _ in range(3):
            while True:
                held = mine.read()
                if mine.replace(f"{int(held.content.split()[0]) + 1} {uuid.uuid4()}".encode(), held):
                    break

    threads = [threading.Thread(target=add) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert conditional(run, "x").read().content.split()[0] == b"9"


@pytest.mark.parametrize("ignored", ["IfNoneMatch", "IfMatch"])
def test_a_server_that_ignores_one_of_the_conditions_is_not_relied_on(moto, monkeypatch, ignored):
    use(monkeypatch, moto)
    put = InS3._put
    monkeypatch.setattr(
        InS3, "_put", lambda self, name, content, condition: put(
            self, name, content, {key: value for key, value in condition.items() if key != ignored})
    )  # fmt: skip
    assert not conditional(Store.at(f"s3://{filled(moto, {})}/run"), "x").certain


def test_a_lost_reply_to_a_conditional_write_is_a_success_and_503_is_waited_out(moto, monkeypatch):
    bucket = filled(moto, {})
    with FaultProxy(moto.endpoint) as proxy:
        use(monkeypatch, moto.behind(proxy.endpoint))
        mine = conditional(Store.at(f"s3://{bucket}/run"), "x")
        proxy.clear()
        proxy.fault("PUT", "/run/x", "lost_reply")
        held = mine.replace(b"1", None)
        assert proxy.outcomes("PUT") == ["lost_reply", "412"] and held == mine.read()
        proxy.fault("PUT", "/run/x", "503", times=2)
        proxy.fault("PUT", "/run/x", "lost_reply")
        held = mine.replace(b"2", held)
        assert proxy.outcomes("PUT")[2:] == ["503", "503", "lost_reply", "412"] and held == mine.read()
        proxy.fault("PUT", "/run/x", "403")
        assert "AWS_ACCESS_KEY_ID" in message(mine.replace, b"3", held)


# The lease


def test_a_lease_is_renewed_and_let_go_so_that_the_next_start_has_it_at_once(run, where):
    told: list[str] = []
    with Lease.acquire(run, told.append, **FAST) as lease:
        assert lease.certain == (where in ("disk", "moto"))
        until(lambda: stored(run)["beat"] >= 3)
        assert stored(run)["holder"] == f"process {os.getpid()} on {os.uname().nodename}"
        sizes = {run.size("lease.json")}
    assert stored(run)["released"] and not lease.lost.is_set() and not lease._thread.is_alive()
    assert sizes == {run.size("lease.json")} == {lease_module.CONTENT_BYTES}
    with Lease.acquire(run, told.append, **FAST) as lease:
        assert stored(run)["id"] == lease._facts["id"]
    assert told == []


def test_a_live_one_refuses_another_start_within_a_beat_or_two(run):
    told: list[str] = []
    with Lease.acquire(run, told.append, **FAST) as lease:
        begin = time.monotonic()
        text = message(Lease.acquire, run, told.append, **(FAST | {"expires_seconds": 30}))
        assert time.monotonic() - begin < 10
        assert text == f"{run.place('')} is being carried by {stored(run)['holder']}; wait for it, or stop it there"
        wait_for_a_beat(run)
        assert not lease.lost.is_set()
    assert len(told) == 1 and "waiting up to 30 s" in told[0]


def test_one_in_a_ray_job_is_named_with_what_ends_it_and_a_lease_without_a_job_still_reads(tmp_path, monkeypatch):
    run = Store.at(str(tmp_path))
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": {}, "metadata": {"job_submission_id": "first-1"}}))
    with Lease.acquire(run, print, **FAST):
        text = message(Lease.acquire, run, print, **(FAST | {"expires_seconds": 30}))
        assert stored(run)["job"] == "first-1" and run.size("lease.json") == lease_module.CONTENT_BYTES
        process = f"process {os.getpid()} on {os.uname().nodename}"
        assert text == f"{tmp_path} is being carried by {process} (Ray job first-1); wait for it, or end it with `ray job stop first-1` at its cluster"
        assert lease_module.sign_of_life(run).holder == f"{process} (Ray job first-1)"
    for other in ("", "{", "[]", '{"metadata": null}', '{"metadata": {"job_submission_id": 5}}'):
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", other)
        with Lease.acquire(run, print, **FAST):
            assert "job" not in stored(run)
            assert message(Lease.acquire, run, print, **(FAST | {"expires_seconds": 30})).endswith("; wait for it, or stop it there")


def test_a_silent_one_is_taken_over_after_its_time_and_is_told(run):
    told: list[str] = []
    first = silent(Lease.acquire(run, told.append, **FAST))
    first._ended.clear()
    begin = time.monotonic()
    with Lease.acquire(run, told.append, **FAST) as second:
        waited = time.monotonic() - begin
        assert waited >= FAST["expires_seconds"] and stored(run)["id"] == second._facts["id"]
        holder = stored(run)["holder"]
        assert told == [
            f"{run.place('')} was carried by {holder}; waiting up to 1 s to see whether it still is",
            f"taking over {run.place('')} from {holder}, not heard of for 1 s",
        ]
        threading.Thread(target=first._renew, daemon=True).start()  # it was only asleep
        assert first.lost.wait(5)
        assert first.reason == f"{run.place('')} was taken over by {holder}; this process no longer carries the run"
        first.release()
        wait_for_a_beat(run)
        assert stored(run)["id"] == second._facts["id"] and not stored(run)["released"] and not second.lost.is_set()


def test_one_that_lets_go_while_another_waits_is_followed_at_once(run):
    first, told = silent(Lease.acquire(run, print, **FAST)), []

    def let_go(text: str) -> None:
        told.append(text)
        assert first._object.replace(first._content(released=True), first._mine)

    with Lease.acquire(run, let_go, **(FAST | {"expires_seconds": 30})) as second:
        assert stored(run)["id"] == second._facts["id"] and len(told) == 1


HOLDER = """
import os, sys
from moco_ray.data.storage import Store
from moco_ray.lease import Lease
Lease.acquire(Store.at(sys.argv[1]), print)
print("held", flush=True)
sys.stdin.read()
os._exit(9)
"""


def test_one_that_died_on_this_machine_is_taken_over_at_once_and_not_before(tmp_path, monkeypatch):
    run, told = Store.at(str(tmp_path)), []
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, run.uri], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "held\n"
        other = stored(run)
        assert other["pid"] == process.pid and not lease_module._ended_here(other)
        assert lease_module._ended_here(other | {"process_start": "1"}), "its number went to another process"
    finally:
        process.stdin.close()
    until(lambda: f"{process.pid} " not in lease_module._text(lease_module.Path(f"/proc/{process.pid}/stat")) or
          lease_module._start_of(process.pid) == "")  # fmt: skip
    assert os.path.exists(f"/proc/{process.pid}"), "nobody waited for it yet"
    assert lease_module._ended_here(other), "a defunct process holds nothing"
    process.wait(10)
    process.stdout.close()
    for elsewhere in ({"boot": "another machine"}, {"pid_namespace": "pid:[1]"}, {"boot": ""}, {"process_start": ""}):
        assert not lease_module._ended_here(other | elsewhere)
    begin = time.monotonic()
    with Lease.acquire(run, told.append):
        assert time.monotonic() - begin < 10
    assert told == [f"taking over {run.place('')} from {other['holder']}, which has ended"]


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"released": false}'])
def test_a_lease_that_is_none_is_waited_for_and_taken(tmp_path, content):
    run, told = Store.at(str(tmp_path)), []
    run.write("lease.json", content)
    with Lease.acquire(run, told.append, **(FAST | {"expires_seconds": 0.2})):
        assert stored(run)["beat"] >= 0
    assert "an unknown process" in told[1]


def test_of_many_that_take_over_at_once_exactly_one_keeps_it(run):
    silent(Lease.acquire(run, print, **FAST))
    together = threading.Barrier(4)
    won: list[Lease] = []
    refused: list[str] = []

    def start() -> None:
        try:
            won.append(Lease.acquire(run, lambda text: "taking over" in text and together.wait(10), **FAST))
        except UserError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) + len(refused) == 4 and all("is being carried by" in text for text in refused)
    if won[0].certain:
        assert len(won) == 1
    until(
        lambda: [lease.lost.is_set() for lease in won].count(False) == 1
    )  # a slow writer is found out at the next beat
    wait_for_a_beat(run)
    (last,) = (lease for lease in won if not lease.lost.is_set())
    assert stored(run)["id"] == last._facts["id"]
    for lease in won:
        lease.release()
    assert stored(run)["released"]


@pytest.mark.parametrize("where", ["rclone"])
def test_where_nothing_is_certain_the_slower_of_two_writers_has_it(run):
    def write_a_little_later() -> None:
        until(lambda: run.size("lease.json") is not None)
        run.write("lease.json", b'{"holder": "the other"}')

    threading.Thread(target=write_a_little_later).start()
    text = message(Lease.acquire, run, print, **(FAST | {"settle_seconds": 3}))
    assert "is being carried by the other" in text and stored(run) == {"holder": "the other"}


def test_a_lease_that_was_removed_is_lost(run):
    with Lease.acquire(run, print, **FAST) as lease:
        while not lease.lost.wait(0.2):  # a beat in flight may write it again where nothing is certain
            run.delete("lease.json")
        assert lease.reason == f"{run.place('lease.json')} was removed; this process no longer carries the run"
    assert run.size("lease.json") is None


@contextlib.contextmanager
def behind_a_proxy(moto, monkeypatch):
    """(the run through a proxy, the run itself, the proxy); a try is given up at once."""
    monkeypatch.setattr(storage, "TRIES", 1)
    bucket = filled(moto, {})
    with FaultProxy(moto.endpoint) as proxy:
        use(monkeypatch, moto)
        host = proxy.endpoint.removeprefix("http://")
        yield Store.at(f"s3://{bucket}/run?endpoint_override={host}&scheme=http"), Store.at(f"s3://{bucket}/run"), proxy


def test_a_storage_that_is_away_for_a_while_is_no_loss(moto, monkeypatch):
    with behind_a_proxy(moto, monkeypatch) as (run, direct, proxy), Lease.acquire(run, print, **FAST) as lease:
        proxy.fault(None, "lease.json", "503", times=6)
        until(lambda: sum(request.outcome == "503" for request in proxy.requests) == 6)
        beat = stored(direct)["beat"]
        until(lambda: stored(direct)["beat"] > beat + 1)
        proxy.fault("PUT", "lease.json", "lost_reply", times=2)
        until(lambda: proxy.outcomes("PUT").count("lost_reply") == 2)
        beat = stored(direct)["beat"]
        until(lambda: stored(direct)["beat"] > beat + 1)
        assert not lease.lost.is_set() and lease._thread.is_alive()


def test_one_that_was_cut_off_learns_of_the_takeover_when_the_storage_is_back(moto, monkeypatch):
    with behind_a_proxy(moto, monkeypatch) as (run, direct, proxy), Lease.acquire(run, print, **FAST) as lease:
        proxy.fault(None, "", "503", times=None)
        until(lambda: "503" in proxy.outcomes("PUT"))
        with Lease.acquire(direct, print, **FAST) as other:
            assert not lease.lost.is_set(), "it cannot know"
            proxy.clear()
            assert lease.lost.wait(5) and "was taken over by" in lease.reason
            lease.release()
            assert not other.lost.wait(0.3) and not stored(direct)["released"]


def test_one_that_slept_asks_before_it_writes_and_one_that_did_not_asks_nothing(run, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(lease_module, "_seconds", lambda: clock[0])
    lease = silent(Lease.acquire(run, print, **FAST))  # its thread has not woken up yet
    lease._thread.join()
    asked, beat = [], lease._beat
    monkeypatch.setattr(lease, "_beat", lambda: asked.append(1) or beat())
    clock[0] = 0.5
    lease.confirm()
    assert not asked
    clock[0] = 100.0
    lease.confirm()  # nobody wanted the run
    lease.confirm()
    assert asked == [1] and stored(run)["beat"] == 1
    clock[0] = 200.0
    with Lease.acquire(run, print, **FAST):
        text = message(lease.confirm)
        assert "was taken over by process" in text and lease.lost.is_set() and lease.reason == text
        assert message(lease.confirm) == text and len(asked) == 2


def test_a_storage_that_refuses_is_told_at_the_start(moto, monkeypatch):
    with behind_a_proxy(moto, monkeypatch) as (run, _, proxy):
        proxy.fault("PUT", "", "403", times=None)
        assert "AWS_ACCESS_KEY_ID" in message(Lease.acquire, run, print, **FAST)
        proxy.clear()
        proxy.fault("GET", "lease.json", "503", times=None)
        assert "lease.json cannot be read after 1 tries" in message(Lease.acquire, run, print, **FAST)


def test_a_run_that_an_earlier_release_carries_is_refused(tmp_path, monkeypatch):
    """It holds the lock of the same file for as long as it lives."""
    import fcntl

    monkeypatch.setattr(conditional_module, "LOCK_SECONDS", 0.2)
    with (tmp_path / "lock").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        text = message(Lease.acquire, Store.at(str(tmp_path)), print, **FAST)
    assert text == f"{tmp_path}/lock is locked by another process; wait for it, or stop it"
