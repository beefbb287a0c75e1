"""One small object that is replaced only by who knows what it held: compare and swap, where the storage has it.

Responsible for reading and replacing it under a file lock on a disk, by If-Match and If-None-Match in S3, and by a mere
look beforehand elsewhere, where two may both succeed (`certain` is False). Some S3 servers ignore both headers (rclone does),
so the server is tried first. Not responsible for what the object means (lease.py).
"""

import contextlib
import fcntl
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from moco_ray.data.storage import CONNECT_SECONDS, S3_SCHEMES, STALLED_SECONDS, Store, one_line, s3_settings
from moco_ray.errors import UserError

LOCK_SECONDS = 10  # a holder of the file lock reads and writes one small file
T = TypeVar("T")


class Held(NamedTuple):
    """What the object holds."""

    content: bytes
    version: str  # ETag; "" where the content stands for itself


@dataclass(frozen=True)
class OnDisk:
    """A file that is replaced under the lock of another. Certain on one machine; on a shared disk as its locks are."""

    store: Store
    name: str
    certain = True

    def read(self) -> Held | None:
        return _read_whole(self.store, self.name)

    def replace(self, content: bytes, expected: Held | None) -> Held | None:
        """Write if the file is as expected (None: not there). Returns what it holds then; None if it was otherwise."""
        with self._locked():
            return _replace_unless_changed(self.store, self.name, content, expected)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        path = Path(self.store.place("lock"))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a+")
        except OSError as error:
            raise UserError(f"{path} cannot be opened ({error}); make room or mend the storage") from error
        with file:  # closing it lets go of the lock
            end = time.monotonic() + LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:  # an earlier release holds it for as long as it carries the run
                    if time.monotonic() > end:
                        raise UserError(f"{path} is locked by another process; wait for it, or stop it") from None
                    time.sleep(0.01)
                except OSError as error:  # some shared disks know no locks
                    raise UserError(f"{path} cannot be locked ({error}); use a storage that can, as s3:// or a local disk") from error
            yield


@dataclass(frozen=True)
class Unconditional:
    """An object anywhere: it is looked at before it is written, and another may write in between."""

    store: Store
    name: str
    certain = False

    def read(self) -> Held | None:
        return _read_whole(self.store, self.name)

    def replace(self, content: bytes, expected: Held | None) -> Held | None:
        """Write if the object is as expected (None: not there). Returns what it holds then; None if it was otherwise."""
        return _replace_unless_changed(self.store, self.name, content, expected)


class InS3:
    """An object in S3 that is written on the condition that its ETag is the one that was read.

    By botocore's own client: pyarrow has no conditions, and s3fs tries again by itself for longer than a lease lasts.
    """

    certain = True

    def __init__(self, store: Store, name: str):
        self.store, self.name = store, name
        self._client, self._bucket, self._prefix = _s3_client(store)

    def read(self) -> Held | None:
        def call() -> Held | None:
            try:
                found = self._client.get_object(Bucket=self._bucket, Key=self._key(self.name))
            except self._client.exceptions.NoSuchKey:
                return None
            return Held(found["Body"].read(), found["ETag"])

        return self.store.attempt("read", self.name, lambda: _as_os_error(call))

    def replace(self, content: bytes, expected: Held | None) -> Held | None:
        """Write if the object is as expected (None: not there). Returns what it holds then; None if it was otherwise.

        A refusal may be that of a second try, after the reply to the first was lost: then the object holds `content`,
        which must for that be unlike what any other process writes.
        """
        condition = {"IfMatch": expected.version} if expected else {"IfNoneMatch": "*"}
        version = self._put(self.name, content, condition)
        if version is not None:
            return Held(content, version)
        held = self.read()
        return held if held and held.content == content else None

    def keeps_conditions(self) -> bool:
        """Whether this server refuses what it should, by an object that is deleted again. Raises UserError as `replace`."""
        probe = f"{self.name}.probe-{uuid.uuid4().hex}"
        try:
            version = self._put(probe, b"1", {"IfNoneMatch": "*"})
            return bool(
                version
                and self._put(probe, b"2", {"IfNoneMatch": "*"}) is None
                and self._put(probe, b"3", {"IfMatch": '"0123456789abcdef0123456789abcdef"'}) is None
                and self._put(probe, b"4", {"IfMatch": version})
            )
        finally:
            with contextlib.suppress(UserError):  # who may not delete leaves an object of one byte
                self.store.attempt("deleted", probe, lambda: _as_os_error(lambda: self._delete(probe)))

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def _delete(self, name: str) -> None:
        self._client.delete_object(Bucket=self._bucket, Key=self._key(name))

    def _put(self, name: str, content: bytes, condition: dict[str, str]) -> str | None:
        """The ETag, or None if the condition does not hold. A server without conditions (501) has an ETag of "" here."""

        def call() -> str | None:
            from botocore.exceptions import ClientError

            try:
                done = self._client.put_object(Bucket=self._bucket, Key=self._key(name), Body=content, **condition)
                return done.get("ETag", "")
            except ClientError as error:
                code, status = error.response["Error"]["Code"], error.response["ResponseMetadata"]["HTTPStatusCode"]
                if code in ("PreconditionFailed", "NoSuchKey") or status == 412:
                    return None
                if code == "NotImplemented" or status == 501:
                    return ""
                raise

        return self.store.attempt("written", name, lambda: _as_os_error(call))


def conditional(store: Store, name: str) -> OnDisk | InS3 | Unconditional:
    """The object `name` below a store, by the surest way that the storage has. Raises UserError if S3 cannot be asked."""
    if store.is_local:
        return OnDisk(store, name)
    if store.uri.partition("://")[0] in S3_SCHEMES:
        found = InS3(store, name)
        if found.keeps_conditions():
            return found
    return Unconditional(store, name)


def _read_whole(store: Store, name: str) -> Held | None:
    return None if store.size(name) is None else Held(store.read(name), "")


def _replace_unless_changed(store: Store, name: str, content: bytes, expected: Held | None) -> Held | None:
    if _read_whole(store, name) != expected:
        return None
    store.write(name, content)
    return Held(content, "")


def _as_os_error(call: Callable[[], T]) -> T:
    """What botocore raises is no OSError; Store.attempt tries those again."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return call()
    except (ClientError, BotoCoreError) as error:
        raise OSError(one_line(error)) from error


def _s3_client(store: Store) -> tuple[Any, str, str]:
    """A client that does not try again by itself, the bucket and the prefix."""
    import botocore.session
    from botocore import UNSIGNED
    from botocore.config import Config

    path, settings = s3_settings(store.uri)
    endpoint = settings["endpoint_override"] and f"{settings['scheme']}://{settings['endpoint_override']}"
    config = Config(
        connect_timeout=CONNECT_SECONDS,
        read_timeout=STALLED_SECONDS,
        retries={"total_max_attempts": 1},
        request_checksum_calculation="when_required",
        signature_version=UNSIGNED if settings["anonymous"] else None,
    )
    session = botocore.session.get_session()
    client = session.create_client("s3", endpoint_url=endpoint, region_name=settings["region"], config=config)
    bucket, _, prefix = path.partition("/")
    return client, bucket, prefix
