"""A store on real servers: rclone and moto with authentication, a proxy that breaks replies, HTTP, memory and a disk.

Nothing here sleeps between tries: `pauses` holds how long it would have been. Requests are counted at the proxy.
"""

import contextlib
import errno
import os
import pickle
import socket
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow.fs as pafs
import pytest

from moco_ray.data import storage
from moco_ray.data.listing import find_data
from moco_ray.data.shards import read_chunk_rows
from moco_ray.data.storage import Entry, Store
from moco_ray.data.survey import build_manifest
from moco_ray.errors import UserError
from tests.fault_proxy import FaultProxy
from tests.object_stores import NO_SERVER, filled, forget, free_port, use

CONTENT = bytes(range(256)) * 4096  # 1 MiB
PARTS = bytes(range(251)) * 50_000  # 12.5 MB: pyarrow uploads it in parts
CREDENTIALS = "the storage refuses the credentials it was given, or they do not permit this: check AWS_ACCESS_KEY_ID"


@pytest.fixture(params=["rclone", "moto"])
def server(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(autouse=True)
def pauses(no_aws, monkeypatch) -> list[float]:
    """The seconds that were waited between tries."""
    seconds = []
    monkeypatch.setattr(storage, "time", SimpleNamespace(sleep=seconds.append))
    return seconds


@pytest.fixture
def bucket(server, monkeypatch) -> str:
    """A bucket of its own for each test, with the right credentials in the variables."""
    use(monkeypatch, server)
    return filled(server, {"photos/b/2.jpg": b"2" * 20, "photos/a/deep/1.jpg": CONTENT, "photos/a-b.jpg": b"ab",
                           "photos/.hidden/3.jpg": b"h", "photos/with spaces/ü.png": b"uml"})  # fmt: skip


def keys(server, bucket: str) -> list[str]:
    return [found["Key"] for found in server.client().list_objects_v2(Bucket=bucket).get("Contents", [])]


def message(call, *arguments) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What an S3 store does


def test_a_listing_holds_every_object_below_sorted_by_name_with_size_and_time(server, bucket):
    names = [".hidden/3.jpg", "a-b.jpg", "a/deep/1.jpg", "b/2.jpg", "with spaces/ü.png"]
    for uri in (f"s3://{bucket}/photos", f"s3://{bucket}/photos/", f"s3a://{bucket}/photos"):
        found = Store.at(uri).list()
        assert [entry.name for entry in found] == names
        assert [entry.bytes for entry in found] == [1, 2, len(CONTENT), 20, 3]
    now = time.time_ns()
    # rclone writes .5 seconds for .500, which pyarrow cannot read: then the time is 0, not known
    assert all(
        abs(now - entry.version) < 600e9 or (entry.version == 0 and server.access_key == "testkey") for entry in found
    )
    assert [entry.name for entry in Store.at(f"s3://{bucket}").list()] == [f"photos/{name}" for name in names]
    assert [entry.name for entry in Store.at(f"s3://{bucket}/photos/a/deep").list()] == ["1.jpg"]


def test_a_data_set_leaves_out_hidden_names_at_every_level(server, bucket):
    found = find_data(Store.at(f"s3://{bucket}/photos"))
    assert [entry.name for entry in found.entries] == ["a-b.jpg", "a/deep/1.jpg", "b/2.jpg", "with spaces/ü.png"]


def test_names_with_marks_of_a_uri_in_them_lead_to_themselves(server, monkeypatch):
    use(monkeypatch, server)
    bucket = filled(
        server, {"a#b/1.jpg": b"hash", "a/1.jpg": b"other", "50%25/1.jpg": b"percent", "é d/1.jpg": b"accent"}
    )
    for prefix, content in {"a#b": b"hash", "50%2525": b"percent", "é d": b"accent", "%C3%A9%20d": b"accent"}.items():
        store = Store.at(f"s3://{bucket}/{prefix}")
        assert [entry.name for entry in store.list()] == ["1.jpg"] and store.read("1.jpg") == content


def test_ranges_and_whole_objects_are_read_to_the_byte(server, bucket):
    store = Store.at(f"s3://{bucket}/photos")
    assert store.read("a/deep/1.jpg") == CONTENT and store.read("with spaces/ü.png") == b"uml"
    for start, stop in [(0, 1), (1000, 1000), (300_001, 300_777), (0, len(CONTENT)), (len(CONTENT) - 1, len(CONTENT))]:
        assert store.read("a/deep/1.jpg", start, stop) == CONTENT[start:stop]
    assert store.read("a/deep/1.jpg", len(CONTENT) - 5) == CONTENT[-5:]


@pytest.mark.parametrize("where", ["s3", "disk", "memory"])
def test_an_object_that_became_shorter_is_told_at_once_wherever_the_range_begins(
    where, rclone, monkeypatch, tmp_path, pauses
):
    use(monkeypatch, rclone)
    uri = {"s3": f"s3://{filled(rclone, {})}/p", "disk": str(tmp_path), "memory": f"memory://{uuid.uuid4().hex}"}[where]
    store = Store.at(uri)
    store.write("short", b"1234567")
    assert "/short has changed: of its bytes 5 to 9 only 2 are there; put it back as it was" in message(
        store.read, "short", 5, 9
    )
    assert "/short has changed: of its bytes 90 to 99 only 0 are there" in message(store.read, "short", 90, 99)
    assert pauses == []


@pytest.mark.parametrize("size", [0, 1, len(PARTS)])
def test_what_is_written_is_stored_to_the_byte_and_a_second_time_replaced(server, bucket, size):
    store = Store.at(f"s3://{bucket}/out")
    for content in (b"before", PARTS[:size]):
        store.write("deep/folder/part.bin", content)
    assert store.size("deep/folder/part.bin") == size
    kept = server.client().get_object(Bucket=bucket, Key="out/deep/folder/part.bin")["Body"].read()
    assert kept == PARTS[:size]


def test_the_size_of_what_is_missing_is_none_and_so_is_that_of_a_folder(server, bucket):
    store = Store.at(f"s3://{bucket}/photos")
    assert (store.size("b/2.jpg"), store.size("b/3.jpg"), store.size("b")) == (20, None, None)


def test_deletion_leaves_nothing_behind_and_twice_is_once(server, monkeypatch):
    use(monkeypatch, server)
    bucket = filled(server, {"keep/0": b"0"})
    store = Store.at(f"s3://{bucket}/run/attempt-1")
    store.write("deep/one", b"1")
    store.write("two", b"2")
    for name in ("deep/one", "two", "two", "never was"):
        store.delete(name)
    assert keys(server, bucket) == ["keep/0"], "an object in place of an emptied folder is a marker that we made"


def test_a_store_survives_pickling_and_works_in_another_process(server, bucket):
    store = Store.at(f"s3://{bucket}/photos")
    assert store.read("b/2.jpg") == b"2" * 20  # opened here: the open client is not what travels
    assert pickle.loads(pickle.dumps(store)) == store and len(pickle.dumps(store)) < 500
    code = "import pickle, sys; print(len(pickle.load(sys.stdin.buffer).read('a/deep/1.jpg', 5, 105)))"
    found = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(store), capture_output=True, timeout=60)
    assert found.stdout == b"100\n", found.stderr


# Where an S3 store finds its settings


def test_a_profile_gives_credentials_region_and_endpoint(server, bucket, monkeypatch, tmp_path):
    for name in server.environment():
        if name not in NO_SERVER:
            monkeypatch.delenv(name)
    (tmp_path / "credentials").write_text(
        f"[lab]\naws_access_key_id = {server.access_key}\naws_secret_access_key = {server.secret_key}\n"
        "[wrong]\naws_access_key_id = nobody\naws_secret_access_key = nothing\n"
    )
    (tmp_path / "config").write_text(
        f"[profile lab]\nregion = us-east-1\nendpoint_url = {server.endpoint}\n"
        f"[profile wrong]\nregion = us-east-1\nendpoint_url = {server.endpoint}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    forget()
    store = Store.at(f"s3://{bucket}/photos")
    assert len(store.list()) == 5
    store.write("c", b"c")
    store.delete("c")  # by s3fs, which must see the same profile
    assert store.size("c") is None and store.read("b/2.jpg") == b"2" * 20
    monkeypatch.setenv("AWS_PROFILE", "wrong")
    forget()
    assert CREDENTIALS in message(store.list)
    assert CREDENTIALS in message(store.delete, "b/2.jpg")
    monkeypatch.setenv("AWS_PROFILE", "nowhere")
    forget()
    text = message(Store.at, f"s3://{bucket}/photos")
    assert "profile (nowhere) could not be found; mend it or unset AWS_PROFILE" in text


def test_options_in_the_uri_name_the_endpoint_before_all_variables(server, bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setattr(pafs, "resolve_s3_region", lambda _: pytest.fail("an endpoint of one's own is not AWS's"))
    forget()
    host = urlsplit(server.endpoint).netloc
    for options in (f"endpoint_override={host}&scheme=http&region=us-east-1", f"endpoint_override={server.endpoint}"):
        store = Store.at(f"s3://{bucket}/photos?{options}")
        assert len(store.list()) == 5
        assert store.place("b/2.jpg") == f"s3://{bucket}/photos/b/2.jpg"
        store.write("c", b"c")
        store.delete("c")
        assert "photos/c" not in keys(server, bucket)


def test_the_endpoint_of_s3_alone_goes_before_that_of_all_services(rclone, monkeypatch):
    bucket = filled(rclone, {"a": b"a"})
    use(monkeypatch, rclone, AWS_ENDPOINT_URL="http://127.0.0.1:1", AWS_ENDPOINT_URL_S3=rclone.endpoint)
    assert Store.at(f"s3://{bucket}").list()[0].name == "a"


def test_settings_of_the_uri_go_before_variables_and_those_before_the_profile(monkeypatch, tmp_path):
    (tmp_path / "config").write_text("[default]\nregion = ca-west-1\nendpoint_url = https://profile:1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))

    def settings(options: str = "") -> tuple:
        _, found = storage.s3_settings(f"s3://bucket/p{options}")
        return found["region"], found["scheme"], found["endpoint_override"]

    assert settings() == ("ca-west-1", "https", "profile:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://variable:2/")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    assert settings() == ("eu-west-1", "http", "variable:2")
    monkeypatch.setenv("AWS_REGION", "eu-west-2")
    assert settings() == ("eu-west-2", "http", "variable:2")
    assert settings("?region=eu-west-3&endpoint_override=uri:3") == ("eu-west-3", "https", "uri:3")
    assert settings("?endpoint_override=http://uri:3") == ("eu-west-2", "http", "uri:3")
    assert settings("?endpoint_override=uri:3&scheme=http") == ("eu-west-2", "http", "uri:3")
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    assert settings() == ("us-east-1", "http", "variable:2"), "what an endpoint of one's own expects"


def test_anonymous_leaves_the_credentials_of_the_machine_out(rclone, monkeypatch):
    use(monkeypatch, rclone)
    bucket = filled(rclone, {"a": b"a"})
    assert CREDENTIALS in message(Store.at(f"s3://{bucket}?anonymous=true").list)
    assert len(Store.at(f"s3://{bucket}?anonymous=false").list()) == 1


# What cannot be, in one line that names the object, the cause and the cure


@pytest.mark.parametrize("wrong", ["AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"])
def test_wrong_credentials_are_told_as_such_by_every_call_at_once(server, bucket, monkeypatch, wrong, pauses):
    use(monkeypatch, server, **{wrong: "another"})
    store = Store.at(f"s3://{bucket}/photos")
    calls = {"read": lambda: store.read("b/2.jpg"), "looked at": lambda: store.size("b/2.jpg"),
             "written": lambda: store.write("b/2.jpg", b"x"), "deleted": lambda: store.delete("b/2.jpg")}  # fmt: skip
    for what, call in calls.items():
        text = message(call)
        assert text.startswith(f"s3://{bucket}/photos/b/2.jpg cannot be {what} (") and CREDENTIALS in text
        assert "another" not in text and server.secret_key not in text
    for call in (store.list, lambda: build_manifest(store.uri)):
        text = message(call)
        assert text.startswith(f"s3://{bucket}/photos cannot be") and CREDENTIALS in text
    assert pauses == [], "another try with the same credentials is of no use"


def test_no_credentials_at_all_are_told_as_such(server, bucket, monkeypatch, pauses):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    forget()
    store = Store.at(f"s3://{bucket}/photos")
    calls = [lambda: store.read("b/2.jpg"), lambda: store.delete("b/2.jpg"), lambda: store.write("x", b"x")]
    for call in calls[
        : 3 if server.access_key == "testkey" else 2
    ]:  # moto fails with 500 on an upload without a signature
        assert CREDENTIALS in message(call)
    assert pauses == []


def test_a_bucket_that_is_missing_is_named(server, bucket, pauses):
    store = Store.at(f"s3://no-{bucket}/photos")
    text = message(build_manifest, store.uri)
    assert (
        text
        == f"s3://no-{bucket}/photos: there is no bucket 'no-{bucket}'; check its name, the endpoint and the region"
    )
    assert f"s3://no-{bucket}/photos/x cannot be written (" in message(store.write, "x", b"x")
    assert "there is no such bucket: check its name, the endpoint and the region" in message(store.write, "x", b"x")
    assert pauses == []


def test_a_prefix_with_nothing_in_it_and_one_that_is_an_object_are_no_data_sets(server, bucket, pauses):
    text = message(build_manifest, f"s3://{bucket}/phot")
    assert text == f"nothing lies at s3://{bucket}/phot; check the name, a bucket's prefix has no wildcards"
    text = message(build_manifest, f"s3://{bucket}/photos/b/2.jpg")
    assert text.startswith(f"s3://{bucket}/photos/b/2.jpg is a file, and a data set is a folder; give the folder")
    assert Store.at(f"s3://{bucket}/phot").list() == [] and pauses == []


def test_an_object_that_is_missing_is_named_at_once(server, bucket, pauses):
    text = message(Store.at(f"s3://{bucket}/photos").read, "b/9.jpg", 0, 10)
    assert text.startswith(f"s3://{bucket}/photos/b/9.jpg cannot be read (")
    assert text.endswith("; it does not exist: put it back as it was, or begin anew") and pauses == []


@pytest.mark.parametrize("uri", [
    "s3://AKIA9:hunt3r2@bucket/photos", "s3://AKIA9:hun/t3r2@bucket/photos", "s3://AKIA9@bucket/photos",
    "s3://bucket/photos?access_key=AKIA9&secret_key=hunt3r2", "ftp://AKIA9:hunt3r2@host/photos",
    "s3://AKIA9:hunt3r2@bucket/photos?secret_key=hunt3r2",
])  # fmt: skip
def test_credentials_in_a_uri_are_refused_and_not_shown(uri):
    text = message(Store.at, uri)
    assert "AKIA9" not in text and "t3r2" not in text
    assert "unknown option" in text or "credentials in a URI would be written into the run folder" in text


@pytest.mark.parametrize("uri, says", {
    "": "no data set is named; give a folder or a URI",
    "s3:///photos": "s3:///photos: there is no bucket in it; write s3://bucket/prefix, with options of",
    "s3://bucket/p?endpoint=x": "s3://bucket/p: unknown option 'endpoint' (a ? in a name is written %3F); write s3://bucket/prefix",
    "zzz://host/photos": "zzz://host/photos: Protocol not known: zzz; check the URI",
    "file://photos": "file://photos: a file:// URI has three slashes before its path",
    "gs://bucket/photos": "install it on every machine of the run",
}.items())  # fmt: skip
def test_a_uri_that_cannot_be_opened_is_refused_before_the_network_is_asked(uri, says, monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)  # as where the package is missing
    assert says in message(Store.at, uri)


def test_an_account_or_container_before_the_host_is_no_credential():
    with pytest.raises(UserError, match="install it|check the URI|Please install") as caught:
        Store.at(
            "abfs://container@account.dfs.core.windows.net/photos"
        )  # adlfs is missing here: it came as far as that
    assert "credentials" not in str(caught.value)


# Faults on the way


@pytest.fixture
def faulty(rclone, monkeypatch):
    """A proxy before rclone, and a store of one object of 1 MiB behind it."""
    bucket = filled(rclone, {"p/object": CONTENT})
    with FaultProxy(rclone.endpoint) as proxy:
        use(monkeypatch, rclone.behind(proxy.endpoint))
        store = Store.at(f"s3://{bucket}/p")
        store._opened  # noqa: B018  a new client waits for requests in flight
        yield proxy, store


@pytest.mark.parametrize("kind", ["503", "reset", "cut"])
def test_three_faults_one_after_the_other_cost_a_pause_and_no_byte(faulty, pauses, kind):
    """Three are as many as pyarrow forgives by itself."""
    proxy, store = faulty
    proxy.fault("GET", "/p/object", kind, times=3)
    assert store.read("object", 100, 900_000) == CONTENT[100:900_000]
    assert proxy.outcomes("GET")[:3] == [kind] * 3 and len(proxy.outcomes("GET")) == 4
    assert len(pauses) == 1


def test_a_reply_that_stalls_is_asked_for_again(faulty, monkeypatch):
    proxy, store = faulty
    monkeypatch.setattr(storage, "STALLED_SECONDS", 1)
    forget()
    proxy.fault("GET", "/p/object", "stall", seconds=30, after_bytes=0)  # curl takes a mean over 6 seconds
    begin = time.monotonic()
    assert store.read("object") == CONTENT
    assert proxy.outcomes("GET")[0] == "stall" and time.monotonic() - begin < 10


@pytest.mark.slow  # 17 seconds
def test_a_stall_of_20_seconds_in_mid_body_is_not_sat_out_with_the_settings_of_the_product(faulty):
    proxy, store = faulty
    proxy.fault("GET", "/p/object", "stall", seconds=20)
    assert store.read("object") == CONTENT
    assert proxy.outcomes("GET")[0] == "stall" and len(proxy.outcomes("GET")) > 1


def test_a_listing_goes_on_after_faults_too(faulty, pauses):
    proxy, store = faulty
    proxy.fault("GET", "list-type=2", "503", times=3)
    assert [entry.name for entry in store.list()] == ["object"]
    assert proxy.outcomes("GET")[:3] == ["503"] * 3 and len(pauses) == 1


def test_an_endless_503_ends_in_one_line_that_names_the_object(faulty, pauses, monkeypatch):
    proxy, store = faulty
    monkeypatch.setattr(storage, "TRIES", 2)
    proxy.fault("HEAD", "/p/object", "503", times=None)
    text = message(store.read, "object")
    assert text.startswith(f"{store.uri}/object cannot be read after 2 tries (")
    assert text.endswith("; see that the storage can be reached and is well, then go on")
    assert set(proxy.outcomes("HEAD")) == {"503"} and len(proxy.outcomes("HEAD")) == 2 * 3 and len(pauses) == 1


def test_pauses_double_are_scattered_and_end_after_the_fifth_try(tmp_path, pauses):
    def fail():
        raise OSError("weather")

    store = Store.at("memory://weather")
    for _ in range(30):
        pauses.clear()
        text = message(store.attempt, "read", "x", fail)
        assert (
            text
            == "memory://weather/x cannot be read after 5 tries (weather); see that the storage can be reached and is "
            "well, then go on"
        )
        assert len(pauses) == 4
        assert all(0.25 * 2**k <= seconds <= 0.75 * 2**k for k, seconds in enumerate(pauses))
    message(Store.at(str(tmp_path)).attempt, "read", "x", fail)
    assert len(pauses) == 4, "a disk is asked once"


@pytest.mark.parametrize("refusal", ["403", "expired"])
def test_refused_credentials_are_not_tried_a_second_time(faulty, pauses, refusal):
    proxy, store = faulty
    for method, call in {
        "GET": lambda: store.read("object"),
        "HEAD": lambda: store.size("object"),
        "PUT": lambda: store.write("new", b"x"),
        "DELETE": lambda: store.delete("object"),
    }.items():
        proxy.clear()
        proxy.fault(method, "/p/", refusal, times=None)
        assert CREDENTIALS in message(call)
        assert proxy.outcomes(method) == [refusal]
    assert pauses == []


def test_a_full_bucket_is_told_as_that(faulty, pauses):
    proxy, store = faulty
    for content, method in ((b"x", "PUT"), (PARTS, "POST")):
        proxy.clear()
        proxy.fault(method, "/p/new", "full", times=None)
        assert "the storage is full" in (text := message(store.write, "new", content)) and "make room" in text, text
        assert "full" in proxy.outcomes(method) and store.size("new") is None, proxy.requests
    assert pauses == []


@pytest.mark.parametrize("content", [b"small", PARTS], ids=["at once", "in parts"])
def test_a_lost_reply_to_a_finished_upload_is_a_success(faulty, rclone, pauses, content):
    proxy, store = faulty
    method, part = ("PUT", "/p/new") if len(content) < 100 else ("POST", "uploadId=")
    proxy.fault(method, part, "lost_reply", times=3 if method == "PUT" else 1)  # pyarrow puts a small one again
    store.write("new", content)
    assert "lost_reply" in proxy.outcomes(method)
    bucket = urlsplit(store.uri).netloc
    assert rclone.client().get_object(Bucket=bucket, Key="p/new")["Body"].read() == content
    assert pauses == [], "what is there already is not sent again"


@pytest.mark.parametrize("content", [b"small", PARTS], ids=["at once", "in parts"])
def test_an_upload_that_fails_for_good_leaves_what_was_there(faulty, rclone, monkeypatch, content):
    """Also where its last part alone fails: an object is whole or it is not."""
    proxy, store = faulty
    monkeypatch.setattr(storage, "TRIES", 1)
    part = "/p/object" if len(content) < 100 else "partNumber=2"
    proxy.fault("PUT", part, "503", times=None)
    text = message(store.write, "object", content)
    assert text.startswith(f"{store.uri}/object cannot be written after 1 tries (")
    assert "503" in proxy.outcomes("PUT")
    assert rclone.client().get_object(Bucket=urlsplit(store.uri).netloc, Key="p/object")["Body"].read() == CONTENT


class Lossy:
    """A client that loses the last byte of each upload, as some stores that keep the framing of chunks add some."""

    def __init__(self, filesystem: pafs.FileSystem):
        self.get_file_info, self._open = filesystem.get_file_info, filesystem.open_output_stream

    @contextmanager
    def open_output_stream(self, path: str):
        with self._open(path) as stream:
            yield SimpleNamespace(write=lambda content: stream.write(content[:-1]))


def test_an_object_of_another_size_than_was_sent_is_a_failure(rclone, monkeypatch, pauses):
    use(monkeypatch, rclone)
    store = Store.at(f"s3://{filled(rclone, {})}/p")
    filesystem, path = store._opened
    monkeypatch.setattr(Store, "_opened", (Lossy(filesystem), path))
    text = message(store.write, "x", b"1234")
    assert "/p/x cannot be written after 5 tries (3 bytes are stored of 4 that were sent)" in text and len(pauses) == 4


# Other storage


@pytest.fixture(scope="module")
def website(tmp_path_factory):
    """http.server over a folder `photos`, in a process of its own: (URI of the folder, the folder)."""
    folder = tmp_path_factory.mktemp("website")
    for name in ("cat/1.png", "cat/deep/2 b.png", "dog/ü.png", ".hidden/3.png"):
        (folder / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "photos" / name).write_bytes(name.encode() * 100)
    port = free_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/photos", folder / "photos"
    finally:
        process.terminate()
        process.wait(10)


def test_a_tree_on_a_web_server_is_listed_with_sizes_and_read(website):
    uri, folder = website
    manifest = build_manifest(uri)
    assert manifest.layout == "tree" and manifest.classes == ("cat", "dog")
    assert manifest.names.to_pylist() == ["cat/1.png", "cat/deep/2%20b.png", "dog/%C3%BC.png"], (
        "as the server links them"
    )
    files = [folder / unquote(name) for name in manifest.names.to_pylist()]
    assert manifest.chunk_bytes.tolist() == [file.stat().st_size for file in files]
    for chunk, file in enumerate(files):
        assert read_chunk_rows(manifest, chunk, np.array([0])).encoded == [file.read_bytes()]


def test_a_web_server_tells_a_file_from_a_folder_and_what_is_missing_or_forbidden(website, pauses):
    uri, _ = website
    assert "/photos/cat/1.png is a file, and a data set is a folder" in message(build_manifest, f"{uri}/cat/1.png")
    assert (
        message(build_manifest, f"{uri}/none")
        == f"nothing lies at {uri}/none; check the name, a bucket's prefix has no wildcards"
    )
    store = Store.at(uri)
    assert f"{uri}/cat/9.png cannot be read (" in message(store.read, "cat/9.png")
    for call in (lambda: store.write("new", b"1"), lambda: store.delete("cat/1.png")):
        assert "NotImplementedError); this kind of storage does not permit it: name another" in message(call)
    assert pauses == [] and store.size("cat/1.png") == 900


def test_a_web_server_that_is_down_is_told_after_five_tries(pauses):
    text = message(build_manifest, f"http://127.0.0.1:{free_port()}/photos")
    assert "after 5 tries (Cannot connect to host" in text and len(pauses) == 4


def test_storage_of_fsspec_is_written_listed_read_and_deleted(pauses):
    store = Store.at(f"memory://{uuid.uuid4().hex}/photos")
    assert store.list() == []
    for name in ("b/2.png", "1.png", "b/deep/3.png", ".hidden"):
        store.write(name, name.encode())
    names = [".hidden", "1.png", "b/2.png", "b/deep/3.png"]
    assert store.list() == [Entry(name, len(name), 0) for name in names]
    assert store.read("b/2.png") == b"b/2.png" and store.read("b/2.png", 2, 5) == b"2.p"
    assert build_manifest(store.uri).names.to_pylist() == names[1:]
    for name in ("b/2.png", "b/2.png"):
        store.delete(name)
    assert store.size("b/2.png") is None and len(store.list()) == 3
    assert message(store.read, "b/2.png").endswith("; it does not exist: put it back as it was, or begin anew")
    assert pauses == []


def test_a_disk_is_a_store_under_its_path_its_file_uri_and_the_home_sign(tmp_path, monkeypatch):
    (tmp_path / "it is 50%25 ü#1").mkdir()
    store = Store.at(str(tmp_path / "it is 50%25 ü#1"))
    for name in ("b/2.png", "1.png"):
        store.write(name, name.encode())
    assert [entry.name for entry in store.list()] == ["1.png", "b/2.png"] and store.read("b/2.png", 2) == b"2.png"
    assert store.size("1.png") == 5 and store.size("b") is None and store.is_local
    store.delete("1.png")
    store.delete("1.png")
    assert os.listdir(store.uri) == ["b"], "and no scratch file either"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for uri in (f"file://{tmp_path}/it%20is%2050%2525%20%C3%BC#1", "~/it is 50%25 ü#1", "it is 50%25 ü#1/."):
        assert Store.at(uri) == store


def test_a_write_to_a_disk_that_fails_leaves_the_old_file_and_no_scratch(tmp_path, monkeypatch):
    store = Store.at(str(tmp_path))
    store.write("file", b"old")

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    text = message(store.write, "file", b"new")
    assert (
        text == f"{tmp_path}/file cannot be written ([Errno 28] No space left on device); make room or mend the storage"
    )
    assert os.listdir(tmp_path) == ["file"] and store.read("file") == b"old"


def test_a_folder_marker_of_no_name_repeats_nothing_and_a_key_with_two_slashes_is_refused(moto, monkeypatch):
    use(monkeypatch, moto)
    bucket = filled(moto, {"m/": b"", "m//": b"", "m/a.jpg": b"1", "m/c/b.jpg": b"2"})
    assert [entry.name for entry in Store.at(f"s3://{bucket}/m").list()] == ["a.jpg", "c/b.jpg"]
    for key in ("m/c//d.jpg", "m//d.jpg"):
        bucket = filled(moto, {"m/a.jpg": b"1", key: b"2"})
        assert "has an empty part between two slashes, and cannot be read; rename it" in message(
            Store.at(f"s3://{bucket}/m").list
        )


def test_an_object_of_the_prefix_s_own_name_does_not_hide_what_lies_below_it(moto, monkeypatch):
    use(monkeypatch, moto)  # rclone keeps objects as files, of which none can be a folder too
    bucket = filled(moto, {"r": b"1", "r/a.jpg": b"2"})
    assert find_data(Store.at(f"s3://{bucket}/r")).entries[0].name == "a.jpg"


@pytest.mark.parametrize("options", ["foo", "anonymous", "region=", "anonymous=1"])
def test_options_without_a_value_or_a_meaning_are_refused(options):
    assert "write s3://bucket/prefix, with options of endpoint_override" in message(Store.at, f"s3://b/what?{options}")


def test_a_uri_that_is_none_is_refused():
    assert "Invalid IPv6 URL; check the URI" in message(Store.at, "s3://[b/x")


def test_a_folder_named_like_a_refusal_does_not_make_one_of_a_passing_fault(tmp_path):
    store = Store(str(tmp_path / "Forbidden"))
    assert store._cure(OSError(f"busy: {tmp_path}/Forbidden/AccessDenied.jpg"), "AccessDenied.jpg") == ""
    assert "permissions" in store._cure(OSError("Forbidden"), "x.jpg")


@pytest.mark.parametrize("place", ["/data/what?/images", "s3://b/p?region=eu"])
def test_a_store_holds_itself_and_what_lies_in_it_and_nothing_beside(place):
    store = Store(place)
    base, mark, options = place.partition("?") if "://" in place else (place, "", "")
    assert store.holds(store) and store.holds(Store(f"{base}/in{mark}{options}"))
    assert not store.holds(Store(f"{base}side{mark}{options}")) and not store.holds(Store("/elsewhere"))
    if mark:
        assert store.holds(Store(f"{base}/{mark}{options}")) and Store(f"{base}/{mark}{options}").holds(store)
    assert store.place("a.jpg") == f"{base}/a.jpg"
