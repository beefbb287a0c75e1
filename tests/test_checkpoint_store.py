"""Checkpoints in any storage: on a disk, in memory, and on a real S3 server behind a proxy that breaks what it is told to.

Pauses between tries are short here, their number is the product's. Each fault is seen in the proxy's log.
"""

import json
import os
import pickle
import re
import resource
import tracemalloc
import uuid
from types import SimpleNamespace

import pytest
import torch

from moco_ray import attempts, checkpoint, worker
from moco_ray.attempts import Attempt
from moco_ray.checkpoint import Damaged
from moco_ray.data import order, storage
from moco_ray.data.storage import Store
from moco_ray.errors import UserError
from moco_ray.placement import DataPlace
from moco_ray.ranks import Ranks
from tests.fault_proxy import FaultProxy
from tests.object_stores import filled, use

ABOUT = {"recipe_fingerprint": "r", "data_fingerprint": "d", "order_version": order.VERSION}


@pytest.fixture(autouse=True)
def _short_pauses(no_aws, monkeypatch):
    monkeypatch.setattr(storage, "FIRST_PAUSE_SECONDS", 0.01)


@pytest.fixture(params=["disk", "memory", "s3"])
def run(request, tmp_path, monkeypatch) -> Store:
    """An empty run folder."""
    if request.param == "s3":
        server = request.getfixturevalue("rclone")
        use(monkeypatch, server)
        return Store.at(f"s3://{filled(server, {})}/runs/one")
    return Store.at(str(tmp_path / "run") if request.param == "disk" else f"memory://{uuid.uuid4().hex}/run")


@pytest.fixture
def s3(rclone, monkeypatch):
    """(run folder behind a proxy, the proxy)."""
    bucket = filled(rclone, {})
    with FaultProxy(rclone.endpoint) as proxy:
        use(monkeypatch, rclone.behind(proxy.endpoint))
        yield Store.at(f"s3://{bucket}/run"), proxy


def saved(run: Store, step: int, attempt: int = 1, size: int = 100, keep: int = 9) -> checkpoint.Saved:
    content = checkpoint.pack({"x": torch.full((size,), float(step))}, ABOUT)
    return checkpoint.save(run, step, attempt, content, ABOUT, keep)


def steps(run: Store) -> list[int]:
    return [one.step for one in checkpoint.whole(run)]


def names(run: Store) -> list[str]:
    return [entry.name for entry in run.below("checkpoints").list()]


def value(run: Store, one: checkpoint.Saved) -> float:
    return checkpoint.load(run, one)[0]["x"][0].item()


def message(call, *arguments, kind: type = UserError) -> str:
    with pytest.raises(kind) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    return str(caught.value)


def loaded(run: Store, accept=lambda one: None) -> tuple[int | None, list[str]]:
    told: list[str] = []
    found = checkpoint.load_newest(run, told.append, accept)
    if found:
        assert found[1]["x"][0].item() == found[0].step
    return found and found[0].step, told


# Stores and attempts


@pytest.mark.parametrize("name", ["checkpoints", "a b/ü", "50%25", "why?", "a#b"])
def test_a_folder_below_a_store_holds_what_is_written_through_either(run, name):
    below = run.below(name)
    run.write(f"{name}/one", b"1")
    below.write("deep/two", b"22")
    assert [(entry.name, entry.bytes) for entry in below.list()] == [("deep/two", 2), ("one", 1)]
    assert run.read(f"{name}/deep/two") == b"22" and below.read("one") == b"1"
    assert run.holds(below) and not below.holds(run)


def test_a_folder_below_keeps_the_options_of_the_uri_and_slashes_single():
    uri = "s3://bucket/p%3Fq/?endpoint_override=127.0.0.1:1&scheme=http"
    assert Store(uri).below("why?").uri == "s3://bucket/p%3Fq/why%3F?endpoint_override=127.0.0.1:1&scheme=http"
    assert Store("s3://bucket").below("a/b").uri == "s3://bucket/a/b"
    assert Store("/").below("a").uri == "/a" and Store("/x").below("why?%").uri == "/x/why?%"
    assert Store("memory://x/").below("why?").uri == "memory://x/why?"


def test_attempts_come_back_by_number_and_none_is_overwritten_or_left_out(run):
    assert attempts.all_of(run) == [] and attempts.numbers(run) == []
    first = Attempt(1, 0, 2, nodes=["a", "b"], code={"git_commit": "abc", "versions": {"torch": "2"}})
    for one in (Attempt(1000000, 7, 3, "checkpoints/step-000000007.a000001"), first, Attempt(2, 5, 4)):
        attempts.register(run, one)
    assert [one.number for one in attempts.all_of(run)] == [1, 2, 1000000] and attempts.all_of(run)[0] == first
    assert "attempts/000002.json is there already" in message(attempts.register, run, Attempt(2, 6, 1))
    for content in (b"{", b"\xff", b"[]", b'{"number": 2}', json.dumps(vars(Attempt(3, 5, 1))).encode()):
        run.write("attempts/000002.json", content)
        assert f"{run.place('attempts/000002.json')} is damaged (" in message(attempts.all_of, run)


# Writing, keeping, believing


def test_a_checkpoint_comes_back_equal_and_only_the_newest_are_kept(run):
    assert checkpoint.newest(run) is None and loaded(run) == (None, [])
    for step in (10, 20, 30):
        one = saved(run, step, keep=2)
    assert steps(run) == [30, 20] and checkpoint.newest(run) == one
    assert names(run) == [f"step-0000000{n}.a000001.{part}" for n in (20, 30) for part in ("json", "pt")]
    assert one.name == "checkpoints/step-000000030.a000001" and one.about == ABOUT
    state, about = checkpoint.load(run, one)
    assert torch.equal(state["x"], torch.full((100,), 30.0)) and about == ABOUT
    marker = json.loads(run.read(f"{one.name}.json"))
    assert marker["bytes"] == run.size(f"{one.name}.pt") and (marker["step"], marker["attempt"]) == (30, 1)


def test_checkpoints_of_the_release_before_are_read_as_of_attempt_0(run):
    one = saved(run, 10)
    marker = json.loads(run.read(f"{one.name}.json"))
    del marker["attempt"]
    run.write("checkpoints/step-000000010.pt", run.read(f"{one.name}.pt"))
    run.write("checkpoints/step-000000010.json", json.dumps(marker).encode())
    for part in ("json", "pt"):
        run.delete(f"{one.name}.{part}")
    old = checkpoint.newest(run)
    assert old == one._replace(attempt=0) and old.name == "checkpoints/step-000000010" and loaded(run) == (10, [])
    saved(run, 20, keep=1)
    assert names(run) == ["step-000000020.a000001.json", "step-000000020.a000001.pt"]


def test_what_a_cut_off_worker_writes_past_a_later_attempt_s_start_is_not_believed_and_goes(run):
    attempts.register(run, Attempt(2, 0, 2))
    saved(run, 100, attempt=2)
    saved(run, 120, attempt=2)
    attempts.register(run, Attempt(3, 100, 2))
    assert steps(run) == [100] and loaded(run) == (100, [])
    saved(run, 110, attempt=3, keep=2)
    assert [(one.step, one.attempt) for one in checkpoint.whole(run)] == [(110, 3), (100, 2)]
    assert not any("120" in name for name in names(run))
    attempts.register(run, Attempt(4, 100, 2))  # the one of step 110 was damaged
    assert steps(run) == [100]


def test_a_worker_that_was_replaced_saves_nothing_and_deletes_nothing(run, monkeypatch):
    saved(run, 100, attempt=2)
    attempts.register(run, Attempt(3, 100, 2))
    before = names(run)
    text = message(saved, run, 120, 2, 100, 1)
    assert "could not save the checkpoint of step 120" in text and "attempt 3 carries the run now" in text
    assert names(run) == before, "not even the upload"

    def register_while_uploading(store, name, content, write=Store.write):
        write(store, name, content)
        if name.endswith(".pt"):
            monkeypatch.undo()
            write(store, "attempts/000004.json", json.dumps(vars(Attempt(4, 100, 2))).encode())

    if not run.uri.startswith("s3"):  # there undo would take the credentials too
        monkeypatch.setattr(Store, "write", register_while_uploading)
        assert "attempt 4 carries the run now" in message(saved, run, 130, 3, 100, 1)
        assert steps(run) == [100] and "step-000000130.a000003.json" not in names(run)


def test_one_that_was_replaced_at_the_last_moment_prunes_nothing(run, monkeypatch):
    saved(run, 100, attempt=2)
    attempts.register(run, Attempt(3, 100, 2))
    monkeypatch.setattr(checkpoint, "_refuse_if_replaced", lambda run, attempt: None)
    saved(run, 120, attempt=2, keep=1)
    assert steps(run) == [100]
    saved(run, 110, attempt=3)
    saved(run, 130, attempt=2, keep=1)
    assert steps(run) == [110, 100]


def test_leftovers_without_a_marker_go_but_for_those_that_another_save_may_be_writing(run):
    leftovers = ("step-000000030.a000001", "step-000000010.a000002", "step-000000030.a000002", "step-000000005.a000003")
    for name in leftovers:
        run.write(f"checkpoints/{name}.pt", b"half")
    if run.is_local:
        run.write("checkpoints/.step-000000010.a000002.pt.77.part", b"half")
        run.write("checkpoints/.step-000000005.a000003.pt.77.part", b"half")
    assert loaded(run) == (None, [])
    saved(run, 20, attempt=2)
    own = ["step-000000020.a000002.json", "step-000000020.a000002.pt"]
    assert names(run) == ["step-000000005.a000003.pt", *own, "step-000000030.a000002.pt"]
    if run.is_local:
        hidden = [name for name in os.listdir(run.place("checkpoints")) if name.startswith(".")]
        assert hidden == [".step-000000005.a000003.pt.77.part"]


def test_the_last_good_one_stays_whatever_stands_before_it(run):
    saved(run, 10)
    newer = saved(run, 20)
    run.write(f"{newer.name}.pt", b"cut")
    saved(run, 15, keep=1)  # a new start from step 10
    assert steps(run) == [15] and loaded(run)[0] == 15
    worst = saved(run, 30, keep=1)
    run.write(f"{worst.name}.pt", b"cut")
    assert steps(run) == []
    saved(run, 31, keep=1)
    assert steps(run) == [31] and names(run) == [f"step-000000031.a000001.{part}" for part in ("json", "pt")]


def test_pruning_counts_only_whole_ones(run):
    for step in (10, 20, 30):
        one = saved(run, step)
    run.write(f"{one.name}.pt", b"cut")
    saved(run, 40, keep=2)
    assert steps(run) == [40, 20], "the damaged one of step 30 is none of the two"


def test_a_checkpoint_saved_again_that_fails_is_not_marked_by_the_first_one_s_marker(run, monkeypatch):
    saved(run, 10)
    saved(run, 20)

    def fail_at_markers(store, name, content, write=Store.write):
        if name.endswith(".json"):
            raise UserError("no room")
        write(store, name, content)

    monkeypatch.setattr(Store, "write", fail_at_markers)
    assert "the checkpoint of step 10 is whole" in message(saved, run, 20)
    assert steps(run) == [10]


@pytest.mark.parametrize("how", ["one bit", "shorter"])
def test_what_did_not_come_back_as_it_was_sent_is_not_marked(run, monkeypatch, how):
    saved(run, 10)

    def lie(store, name, content, write=Store.write):
        if name.endswith(".pt"):
            content = content[:-1] if how == "shorter" else content[:50] + bytes([content[50] ^ 1]) + content[51:]
        write(store, name, content)

    monkeypatch.setattr(Store, "write", lie)
    text = message(saved, run, 20)
    assert text.startswith(f"could not save the checkpoint of step 20 in {run.place('checkpoints')}: ")
    assert "did not come back as it was sent: " in text and "; the checkpoint of step 10 is whole, and" in text
    assert names(run) == ["step-000000010.a000001.json", "step-000000010.a000001.pt"] and loaded(run) == (10, [])


def test_what_cannot_be_deleted_fails_no_save_and_goes_at_the_next(run, monkeypatch):
    for step in (10, 20):
        saved(run, step)

    def refuse(store, name):
        raise UserError(f"{name} cannot be deleted")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "delete", refuse)
        saved(run, 30, keep=1)
    assert steps(run) == [30, 20, 10]
    saved(run, 40, keep=1)
    assert steps(run) == [40] and len(names(run)) == 2


def test_a_half_deleted_checkpoint_is_none(run, monkeypatch):
    saved(run, 10)
    delete = Store.delete

    def stop_after_one(store, name):
        if not name.endswith(".json"):
            raise UserError("cut off")
        delete(store, name)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "delete", stop_after_one)
        saved(run, 20, keep=1)
    assert names(run)[0] == "step-000000010.a000001.pt" and steps(run) == [20] and loaded(run) == (20, [])


def test_a_full_disk_while_saving_leaves_the_previous_checkpoint_whole_and_nothing_half_written(tmp_path):
    run = Store.at(str(tmp_path))
    saved(run, 1, keep=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # a file may not grow further, as on a full disk
    try:
        text = message(saved, run, 2, 1, 1_000_000, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert re.search("could not save the checkpoint of step 2 .*File too large.*step 1 is whole", text)
    assert loaded(run) == (1, []) and len(os.listdir(tmp_path / "checkpoints")) == 2


def test_a_large_checkpoint_is_read_back_in_pieces_and_loaded_with_one_copy(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "PIECE_BYTES", 2**20)
    run, content = Store.at(str(tmp_path)), checkpoint.pack({"x": torch.full((2**22,), 7.0)}, ABOUT)  # 16 MiB
    tracemalloc.start()
    try:
        one = checkpoint.save(run, 7, 1, content, ABOUT, 1)
        saving = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        assert value(run, one) == 7
        loading = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert saving < 5 * 2**20 and 2**24 <= loading < 1.5 * 2**24  # the tensors themselves are not Python's


# Damage


def bomb(path) -> object:
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(path),)

    return Bomb()


def damage(run: Store, one: checkpoint.Saved, how: str, tmp_path) -> str:
    """Damage a checkpoint; returns a part of what must be said of it."""
    name, content = f"{one.name}.pt", run.read(f"{one.name}.pt")
    if how == "missing":
        run.delete(name)
        return "it is missing"
    if how == "truncated":
        run.write(name, content[:-1])
        return f"{len(content) - 1} bytes are stored of the {len(content)} that were written"
    if how == "one bit flipped":
        middle = len(content) // 2
        run.write(name, content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        return "its bytes are not those that were written"
    if how == "marker":
        run.write(f"{one.name}.json", b'{"version": 1')
        return "cannot be read"
    if how == "marker of another":
        marker = json.loads(run.read(f"{one.name}.json"))
        run.write(f"{one.name}.json", json.dumps(marker | {"step": one.step + 1}).encode())
        return "cannot be read"
    if how == "future version":
        made = {"version": checkpoint.VERSION + 1, "about": ABOUT, "state": {"x": torch.zeros(3)}}
        says = f"it has version {checkpoint.VERSION + 1} and this release reads {checkpoint.VERSION}"
    elif how == "no checkpoint":
        made, says = torch.zeros(3), "it has version None"
    elif how == "pickle bomb":
        made = {"version": checkpoint.VERSION, "about": ABOUT, "state": {"x": bomb(tmp_path / "executed")}}
        says = "it holds code or objects that are no tensors, which were not executed"
    elif how == "no torch file":
        made, says = None, "is damaged"
    file = tmp_path / "made"
    if made is None:
        file.write_bytes(b"PK\x03\x04" + b"nothing" * 100)
    else:
        torch.save(made, file)
    checkpoint.save(run, one.step, one.attempt, file.read_bytes(), ABOUT, 9)
    return says


HOW = ["missing", "truncated", "one bit flipped", "marker", "marker of another", "no checkpoint", "pickle bomb", "no torch file"]


@pytest.mark.parametrize("how", HOW)
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(tmp_path, how):
    run = Store.at(str(tmp_path / "run"))
    for step in (10, 20):
        saved(run, step)
    says = damage(run, saved(run, 30), how, tmp_path)
    step, told = loaded(run)
    assert step == 20 and len(told) == 1
    place = run.place("checkpoints/step-000000030.a000001.pt")
    assert told[0].startswith(f"the checkpoint {place} is damaged: ") and says in told[0]
    assert told[0].endswith("; using the one of step 20 before it") and "\n" not in told[0]
    assert not (tmp_path / "executed").exists()
    if how == "pickle bomb":
        torch.load(tmp_path / "made", weights_only=False)
        assert (tmp_path / "executed").exists(), "the bomb is none"


@pytest.mark.parametrize("how", [how for how in HOW if not how.startswith("marker")])
def test_loading_a_damaged_checkpoint_names_it_the_cause_and_the_cure(run, tmp_path, how):
    one = saved(run, 30)
    says = damage(run, one, how, tmp_path)
    one = checkpoint.newest(run) or one  # some were saved anew
    text = message(checkpoint.load, run, one, kind=Damaged)
    assert text.startswith(f"the checkpoint {run.place(one.name)}.pt is damaged: ") and says in text and "; " in text
    assert not (tmp_path / "executed").exists()


def test_one_of_a_future_version_ends_the_search_for_the_one_before_would_make_it_a_thing_of_the_past(run, tmp_path):
    saved(run, 20)
    says = damage(run, saved(run, 30), "future version", tmp_path)
    text = message(loaded, run)
    assert says.removeprefix("it ") in text and text.endswith("use the release that wrote it")


def test_several_damaged_ones_are_each_named_and_all_of_them_are_an_error(run, tmp_path):
    for step in (10, 20, 30):
        saved(run, step)
    third, second, first = checkpoint.whole(run)
    damage(run, third, "truncated", tmp_path)
    damage(run, second, "one bit flipped", tmp_path)
    step, told = loaded(run)
    assert step == 10 and ["30.a" in text for text in told] == [True, False] and "step 10 before it" in told[1]
    damage(run, first, "missing", tmp_path)
    text = message(loaded, run)
    assert f"the newest, {run.place(third.name)}.pt is damaged: " in text
    assert text.endswith(f"or remove {run.place('checkpoints')} to start this one from step 0")


def test_one_of_another_recipe_is_not_skipped(run):
    saved(run, 10)
    saved(run, 20)

    def refuse(one):
        checkpoint.refuse_other(run.place(one.name), one.about, "other", "d")

    text = message(loaded, run, refuse)
    assert text.startswith(run.place("checkpoints/step-000000020.a000001")) and "recipe r" in text


# A real S3 server, and what can happen on the way

PARTS = 3_200_000  # values: 12.8 MB, which pyarrow uploads in parts


def test_a_storage_that_is_unwell_for_a_while_costs_no_checkpoint(s3):
    run, proxy = s3
    faults = [("PUT", ".pt"), ("PUT", ".json"), ("GET", "a000001.pt")]
    for method, path in faults:
        proxy.fault(method, path, "503", times=4)  # pyarrow gives up after three
    saved(run, 10)
    assert [proxy.outcomes(*fault).count("503") for fault in faults] == [4] * 3
    assert loaded(run) == (10, [])


@pytest.mark.parametrize("fault, path, size", [
    ("503", "20.a000001.pt", 100), ("403", "20.a000001.pt", 100), ("503", "20.a000001.json", 100),
    ("503", "partNumber=2", PARTS), ("403", "partNumber=2", PARTS)])  # fmt: skip
def test_a_storage_that_is_unwell_for_longer_fails_the_save_and_leaves_the_earlier_one(
    s3, monkeypatch, fault, path, size
):
    run, proxy = s3
    saved(run, 10)
    monkeypatch.setattr(storage, "TRIES", 2)
    proxy.fault("PUT", path, fault, times=None)
    text = message(saved, run, 20, 1, size)
    assert fault in proxy.outcomes("PUT", path)
    assert text.startswith(f"could not save the checkpoint of step 20 in {run.place('checkpoints')}: {run.place('')}")
    assert "; the checkpoint of step 10 is whole, and `moco-ray resume` goes on from there" in text
    proxy.clear()
    assert steps(run) == [10] and loaded(run) == (10, []) and "step-000000020.a000001.json" not in names(run)
    saved(run, 20)
    assert loaded(run) == (20, [])


def test_a_lost_reply_to_a_completed_upload_in_parts_is_a_success(s3):
    run, proxy = s3
    proxy.fault("POST", "uploadId=", "lost_reply")
    one = saved(run, 10, size=PARTS)
    assert "lost_reply" in proxy.outcomes("POST", "uploadId=") and one.bytes > 12_000_000
    assert sum("partNumber=" in request.path for request in proxy.requests) > 1
    assert checkpoint.newest(run) == one and loaded(run) == (10, [])


def test_a_marker_whose_reply_was_lost_for_good_is_a_checkpoint(s3, monkeypatch):
    run, proxy = s3
    monkeypatch.setattr(storage, "TRIES", 1)
    proxy.fault("PUT", ".json", "lost_reply", times=None)
    proxy.fault("HEAD", ".json", "503", times=3, skip=1)  # and so it cannot be looked at then
    one = saved(run, 10)
    assert "lost_reply" in proxy.outcomes("PUT", ".json") and proxy.outcomes("HEAD", ".json")[1:4] == ["503"] * 3
    assert checkpoint.newest(run) == one


def test_an_upload_that_was_cut_has_no_marker_and_the_one_before_is_used(s3, monkeypatch):
    run, proxy = s3
    saved(run, 10)
    monkeypatch.setattr(storage, "TRIES", 1)
    proxy.fault("POST", "uploadId=", "503", times=None)
    message(saved, run, 20, 1, PARTS)
    assert "503" in proxy.outcomes("POST")
    proxy.clear()
    assert not any("20" in name for name in names(run)) and loaded(run) == (10, [])


def test_access_lost_in_the_middle_is_told_as_such(s3):
    run, proxy = s3
    saved(run, 10)
    proxy.fault(None, "", "403", times=None, skip=4)  # listing, marker, the upload and its size pass
    text = message(saved, run, 20)
    assert "AWS_ACCESS_KEY_ID" in text and "; the checkpoints before it are as they were" in text
    assert "403" in {request.outcome for request in proxy.requests}
    proxy.clear()
    assert steps(run) == [10]


def test_an_object_that_was_changed_between_upload_and_look_is_not_marked(s3, rclone, monkeypatch):
    run, proxy = s3
    saved(run, 10)
    bucket = run.uri.split("/")[2]

    def tamper(store, saved, verify=checkpoint._verify):
        key = f"run/{saved.name}.pt"
        held = bytearray(rclone.client().get_object(Bucket=bucket, Key=key)["Body"].read())
        held[-9] ^= 4
        rclone.client().put_object(Bucket=bucket, Key=key, Body=bytes(held))
        verify(store, saved)

    monkeypatch.setattr(checkpoint, "_verify", tamper)
    assert "did not come back as it was sent: its bytes are not those" in message(saved, run, 20)
    assert not any("20" in name for name in names(run)) and loaded(run) == (10, [])


def test_a_storage_that_does_not_answer_is_no_damage(s3, monkeypatch):
    run, proxy = s3
    saved(run, 10)
    saved(run, 20)
    monkeypatch.setattr(storage, "TRIES", 1)
    for method, path in (("GET", "20.a000001.pt"), ("GET", "20.a000001.json"), ("GET", "prefix=")):
        proxy.clear()
        proxy.fault(method, path, "503", times=None)
        told: list[str] = []
        text = message(checkpoint.load_newest, run, told.append, lambda one: None)
        assert "after 1 tries" in text and told == [] and "503" in proxy.outcomes(method)


def test_a_marker_that_was_pruned_since_the_listing_is_no_damage(s3, monkeypatch):
    run, _ = s3
    saved(run, 10)
    saved(run, 20)
    listed = Store.list

    def prune_after(store):
        found = listed(store)
        run.delete("checkpoints/step-000000020.a000001.json")
        return found

    monkeypatch.setattr(Store, "list", prune_after)
    assert loaded(run) == (10, [])


def test_an_attempt_whose_checkpoint_was_pruned_by_a_cut_off_worker_saves_at_once(tmp_path):
    """The worker that was cut off wrote a newer one and pruned; when the new attempt is known that one is not believed."""
    store, told = Store(str(tmp_path)), []
    wire = SimpleNamespace(refuse_superseded=lambda: None, tell=lambda **message: told.append(message), orders={})
    for pruned in (False, True):
        rank = object.__new__(worker._Rank)
        rank._ranks, rank._place, rank._folder = Ranks(), SimpleNamespace(node=worker.Node("1", "a")), SimpleNamespace(store=store)
        rank._wire, rank._job, rank._learner, rank._own_order = wire, SimpleNamespace(asked="1", driver="a"), SimpleNamespace(step=10), None
        rank._attempt, rank._nodes = 2 + pruned, [rank._place.node]
        begun_from = checkpoint.save(store, 10, 1 + pruned, b"content", ABOUT, keep=9)
        if pruned:
            for part in ("json", "pt"):
                store.delete(f"{begun_from.name}.{part}")
        rank._register(begun_from, [], DataPlace(1.0))
        assert told[-1]["kind"] == "begin" and told[-1]["from_step"] == 10
        assert bool(rank._own_order) == pruned
