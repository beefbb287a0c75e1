"""The S3 servers check keys, and each fault of the proxy really happens, as seen by pyarrow and by a plain client."""

import http.client
import time
from urllib.parse import urlsplit

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from pyarrow import fs

from tests.fault_proxy import FaultProxy, Request
from tests.object_stores import REGION, ObjectStore, moto_server, rclone_server

CONTENT = bytes(range(256)) * 4096  # 1 MiB


@pytest.fixture(scope="module", autouse=True)
def _unsigned_upload_checksums():
    """pyarrow asks for it at its first file system; without it rclone refuses uploads with 411."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield


@pytest.fixture(scope="module", params=["rclone", "moto"])
def store(request, tmp_path_factory):
    """A server that holds images/part/a."""
    rclone = request.param == "rclone"
    with rclone_server(tmp_path_factory.mktemp("buckets")) if rclone else moto_server() as server:
        server.create_bucket("images", {"part/a": CONTENT})
        yield server


@pytest.fixture
def proxy(store):
    with FaultProxy(store.endpoint) as proxy:
        yield proxy


def filesystem(store: ObjectStore, **changes: object) -> fs.S3FileSystem:
    settings = {
        "access_key": store.access_key,
        "secret_key": store.secret_key,
        "endpoint_override": urlsplit(store.endpoint).netloc,
        "scheme": "http",
        "region": REGION,
        "retry_strategy": fs.AwsStandardS3RetryStrategy(max_attempts=1),
    }
    return fs.S3FileSystem(**settings | changes)


def read(files: fs.S3FileSystem) -> bytes:
    with files.open_input_file("images/part/a") as file:
        return file.read()


def plain(
    proxy: FaultProxy, method: str = "GET", path: str = "/images/part/a", headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    """Status and body of one request, unsigned unless the headers sign it."""
    connection = http.client.HTTPConnection(urlsplit(proxy.endpoint).netloc, timeout=10)
    try:
        connection.request(method, path, headers=headers or {})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def signed(store: ObjectStore, proxy: FaultProxy) -> dict[str, str]:
    """The headers of a signed GET of the object, for the plain client."""
    request = AWSRequest("GET", f"{proxy.endpoint}/images/part/a")
    S3SigV4Auth(Credentials(store.access_key, store.secret_key), "s3", REGION).add_auth(request)
    return dict(request.headers)


def test_right_key_reads_and_writes(store):
    files = filesystem(store)
    assert read(files) == CONTENT
    with files.open_output_stream("images/part/written") as stream:
        stream.write(CONTENT)
    assert files.get_file_info("images/part/written").size == len(CONTENT)


@pytest.mark.parametrize("wrong", ["access_key", "secret_key"])
def test_wrong_key_is_refused(store, wrong):
    with pytest.raises(OSError, match="ACCESS_DENIED|403"):
        read(filesystem(store, **{wrong: "another"}))


def test_signatures_hold_through_the_proxy(store, proxy):
    files = filesystem(store.behind(proxy.endpoint))
    assert read(files) == CONTENT
    answered = proxy.outcomes("GET")[0]  # rclone says 200 to a range that is the whole object, moto 206
    assert answered in ("200", "206")
    assert proxy.requests == [
        Request("HEAD", "/images/part/a", "200", None),
        Request("GET", "/images/part/a", answered, f"bytes=0-{len(CONTENT) - 1}"),
    ]


def test_uploads_pass_the_proxy_unchanged(store, proxy):
    """Single and in parts; the parts may be chunked."""
    files = filesystem(store.behind(proxy.endpoint), allow_delayed_open=True)
    for name, size in (("single", 1), ("parts", 12)):
        with files.open_output_stream(f"images/part/{name}") as stream:
            for _ in range(size):
                stream.write(CONTENT)
        with filesystem(store).open_input_file(f"images/part/{name}") as file:
            assert file.read() == CONTENT * size
    assert set(proxy.outcomes("PUT") + proxy.outcomes("POST")) == {"200"}
    assert len(proxy.outcomes("PUT", "partNumber=")) >= 2


def test_a_file_put_into_the_folder_is_seen_at_once(tmp_path):
    (tmp_path / "images").mkdir()
    with rclone_server(tmp_path, follow=True) as store:
        files = filesystem(store)
        assert files.get_file_info("images/late").type == fs.FileType.NotFound
        (tmp_path / "images" / "late").write_bytes(b"late")
        assert files.get_file_info("images/late").size == 4
        (tmp_path / "images" / "late").write_bytes(b"later")
        assert files.get_file_info("images/late").size == 5
        (tmp_path / "images" / "late").unlink()
        assert files.get_file_info("images/late").type == fs.FileType.NotFound


@pytest.mark.parametrize(("kind", "code"), [("403", b"AccessDenied"), ("404", b"NoSuchKey"), ("503", b"SlowDown")])
def test_refusal_is_seen_as_often_as_asked(proxy, kind, code):
    proxy.fault("GET", "/part/a", kind, times=2)
    for _ in range(2):
        status, body = plain(proxy)
        assert status == int(kind) and code in body
    plain(proxy)
    assert proxy.outcomes("GET")[:2] == [kind, kind] and len(proxy.requests) == 3
    proxy.fault("HEAD", "", kind)
    assert plain(proxy, "HEAD") == (int(kind), b"")
    proxy.clear()
    assert proxy.requests == []


def test_skip_lets_the_first_requests_pass(proxy):
    proxy.fault(None, "", "404", times=None, skip=1)
    for _ in range(3):
        plain(proxy, path="/")
    assert [outcome == "404" for outcome in proxy.outcomes("GET")] == [False, True, True]


@pytest.mark.parametrize(("kind", "error"), [("reset", ConnectionResetError), ("cut", http.client.IncompleteRead)])
def test_broken_body_is_seen_and_pyarrow_recovers(store, proxy, kind, error):
    proxy.fault("GET", "", kind, times=2)
    with pytest.raises(error):
        plain(proxy, headers=signed(store, proxy))
    files = filesystem(store.behind(proxy.endpoint), retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=3))
    assert read(files) == CONTENT
    assert proxy.outcomes("GET")[:2] == [kind, kind] and len(proxy.outcomes("GET")) == 3


def test_cut_sends_as_many_bytes_as_asked(store, proxy):
    proxy.fault("GET", "/part/a", "cut", after_bytes=1000)
    with pytest.raises(http.client.IncompleteRead) as error:
        plain(proxy, headers=signed(store, proxy))
    assert error.value.partial == CONTENT[:1000]


def test_stall_delays_the_second_half(store, proxy):
    proxy.fault("GET", "", "stall", seconds=0.4)
    begin = time.monotonic()
    assert plain(proxy, headers=signed(store, proxy)) == (200, CONTENT)
    assert time.monotonic() - begin >= 0.4
    assert proxy.outcomes("GET") == ["stall"]


def test_lost_reply_still_writes_the_object(store, proxy):
    proxy.fault("PUT", "/part/lost", "lost_reply", times=None)
    files = filesystem(store.behind(proxy.endpoint), allow_delayed_open=True)
    stream = files.open_output_stream("images/part/lost")
    stream.write(CONTENT)
    with pytest.raises(OSError):
        stream.close()
    assert set(proxy.outcomes("PUT")) == {"lost_reply"}
    assert filesystem(store).get_file_info("images/part/lost").size == len(CONTENT)


def test_unknown_kind_is_refused(proxy):
    with pytest.raises(ValueError, match="teapot"):
        proxy.fault("GET", "", "teapot")


def test_nothing_is_served_after_the_end(store):
    with FaultProxy(store.endpoint) as proxy:
        kept = http.client.HTTPConnection(urlsplit(proxy.endpoint).netloc, timeout=5)
        kept.request("GET", "/")
        kept.getresponse().read()
    with pytest.raises(OSError):
        kept.request("GET", "/")
        kept.getresponse()
    kept.close()
    with pytest.raises(ConnectionRefusedError):
        plain(proxy)
