"""A folder anywhere: on a disk, in S3-compatible object storage, or behind any fsspec URI.

Responsible for opening it, for listing, reading by range, writing whole or not at all, for bounded retries, and for
naming the object, the cause and the cure when one fails. Not responsible for what lies in it (listing.py, shards.py).

S3 goes through pyarrow's client (three times the rate of s3fs, by the design notes), everything else but local disks
through fsspec. pyarrow gives up after three replies of 503, and calls an upload failed whose last reply was lost: hence
the tries and the second look of our own.
"""

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

import fsspec
import pyarrow as pa
import pyarrow.fs as pafs

from moco_ray.errors import StorageFailing, UserError

# Before the first S3 call of this process: pyarrow's trailing checksums make some stores answer 411, and others keep
# the framing of the upload as data.
os.environ.setdefault("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")

TRIES = 5
FIRST_PAUSE_SECONDS = 0.5  # doubled at each further try, give or take a half: 4 to 11 seconds in all
CONNECT_SECONDS = 5
STALLED_SECONDS = 10  # without a byte: the request is made again
LISTING_THREADS = 16
PIECE_BYTES = 16 * 2**20  # of a large object that is compared: no second copy of it is held
S3_SCHEMES = ("s3", "s3a", "s3n")
S3_OPTIONS = ("endpoint_override", "scheme", "region", "anonymous")  # in the URI, as ?key=value&...

T = TypeVar("T")


class Entry(NamedTuple):
    """One file or object."""

    name: str  # relative POSIX name below the store
    bytes: int
    version: int  # time of its last change in nanoseconds; 0 where the storage tells none


@dataclass(frozen=True)
class Store:
    """A folder and what can be done below it. Small and picklable; each process opens the filesystem for itself.

    Names are relative POSIX names. Every call tries `TRIES` times where another try may help, then raises UserError.
    """

    uri: str  # an absolute path, or a URI; never with credentials in it

    @classmethod
    def at(cls, uri: str) -> "Store":
        """The folder that a user names: a path, file://, s3:// or another URI known to fsspec.

        s3://bucket/prefix takes `?endpoint_override=host:port&scheme=http&region=..&anonymous=true`; otherwise the
        endpoint, region and credentials are the usual ones of AWS: variables, profile, role of the machine.
        Raises UserError for an unknown scheme or option, and for credentials in the URI. Asks nobody, but for
        AWS about a bucket's region where no endpoint and no region is named.
        """
        if not uri:
            raise UserError("no data set is named; give a folder or a URI, for example data.uri=/data/images")
        try:
            parsed = urlsplit(uri, allow_fragments=False)  # "#" is a letter like others in the names of objects
        except ValueError as error:
            raise UserError(f"{uri}: {one_line(error)}; check the URI") from error
        if "://" not in uri or parsed.scheme == "file":
            if parsed.scheme == "file" and parsed.netloc not in ("", "localhost"):
                raise UserError(f"{uri}: a file:// URI has three slashes before its path, as in file:///data/images")
            path = Path(unquote(parsed.path) if "://" in uri else uri).expanduser()
            return cls(str(path.resolve()))
        # A name alone is an account or a container (sftp, abfs), but no bucket has one; a secret may hold a slash.
        in_s3 = parsed.scheme in S3_SCHEMES and "@" in (uri if ":" in parsed.netloc else parsed.netloc)
        if parsed.password or in_s3:
            raise UserError(
                f"{parsed.scheme}://...@{uri.rpartition('@')[2].partition('?')[0]}: credentials in a URI would be written into the run "
                "folder; give them by AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or a role"
            )
        store = cls(uri)
        store._opened  # noqa: B018  raises what is wrong with the URI
        return store

    @property
    def is_local(self) -> bool:
        return "://" not in self.uri

    @property
    def _opened(self) -> tuple[pafs.FileSystem, str]:
        return _open(self.uri)

    def filesystem(self) -> tuple[pafs.FileSystem, str]:
        """pyarrow's filesystem and the folder's path in it, for other libraries. Their calls are not tried again."""
        return self._opened

    def _path(self, name: str) -> str:
        base = self._opened[1]
        return f"{base}/{name}" if base and name else base or name

    def place(self, name: str) -> str:
        """A name in full, for messages."""
        base = self.uri if self.is_local else self.uri.partition("?")[0]
        return f"{base.rstrip('/')}/{name}" if name else base

    def below(self, name: str) -> "Store":
        """A folder in this one as a store of its own, with the same options. `name` is a relative POSIX name."""
        if self.uri.partition("://")[0] not in S3_SCHEMES:
            return Store(f"{self.uri.rstrip('/')}/{name}")
        folder, mark, options = self.uri.partition("?")
        quoted = name.replace("%", "%25").replace("?", "%3F")  # as a URI of S3 writes them
        return Store(f"{folder.rstrip('/')}/{quoted}{mark}{options}")

    def holds(self, other: "Store") -> bool:
        """Whether the other folder is this one or lies in it."""
        (filesystem, base), (theirs, path) = self._opened, other._opened
        return filesystem.equals(theirs) and f"{path}/".startswith(f"{base}/")

    def list(self) -> list[Entry]:
        """Every file below, sorted by name; [] if there is nothing. First-level folders are listed side by side."""
        if self.is_local:
            return _local_files(Path(self.uri))
        filesystem, base = self._opened
        if isinstance(filesystem, pafs.PyFileSystem):
            filesystem.handler.fs.invalidate_cache()  # others may have written since it was listed

        def level(path: str, recursive: bool) -> list[pafs.FileInfo]:
            return self.attempt("listed", self._relative(path), lambda: filesystem.get_file_info(
                pafs.FileSelector(path, recursive=recursive, allow_not_found=True)))  # fmt: skip

        def sized(info: pafs.FileInfo) -> pafs.FileInfo:  # a listing by HTTP tells none
            if info.type != pafs.FileType.File or info.size is not None:
                return info
            return self.attempt("looked at", self._relative(info.path), lambda: filesystem.get_file_info(info.path))

        top = level(base, False)
        # A folder of the name "" is `base/` to pyarrow, which would list base again for it.
        folders = [i.path for i in top if i.type == pafs.FileType.Directory and i.path.rstrip("/") != base]
        with ThreadPoolExecutor(LISTING_THREADS) as threads:
            parts = [top, *threads.map(lambda folder: level(folder, True), folders)]
            infos = list(threads.map(sized, chain.from_iterable(parts)))
        if not top:
            self._refuse_missing_bucket()
        files = [info for info in infos if info.type == pafs.FileType.File]
        if double := next((i.path for i in files if "//" in i.path.removeprefix(base)), None) or self._empty_folder(top):
            raise UserError(f"{self.place('')}: {double} has an empty part between two slashes, and cannot be read; rename it")
        found = sorted(Entry(self._relative(info.path), info.size, info.mtime_ns or 0) for info in files)
        assert len({entry.name for entry in found}) == len(found), "a name is listed twice"
        return found

    def _empty_folder(self, top: Iterable[pafs.FileInfo]) -> str | None:
        """A key in a folder of the name "" that is more than that folder's marker, if there is one (S3)."""
        bucket, _, prefix = self._opened[1].partition("/")
        if not any(i.type == pafs.FileType.Directory and i.path.rstrip("/") == self._opened[1] for i in top):
            return None
        s3, prefix = _s3fs(self.uri), f"{prefix}//" if prefix else "/"
        held = self.attempt("listed", "", lambda: s3.call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, MaxKeys=2))
        return next((one["Key"] for one in held.get("Contents", []) if one["Key"] != prefix), None)

    def _refuse_missing_bucket(self) -> None:
        """Raise UserError if that is why nothing was listed; for other storage an empty list is all that is known."""
        filesystem, base = self._opened
        if isinstance(filesystem, pafs.S3FileSystem):
            bucket = base.partition("/")[0]
            info = self.attempt("looked at", "", lambda: filesystem.get_file_info(bucket))
            if info.type == pafs.FileType.NotFound:
                raise UserError(
                    f"{self.place('')}: there is no bucket {bucket!r}; check its name, the endpoint and the region"
                )

    def _relative(self, path: str) -> str:
        return path.removeprefix(self._opened[1]).lstrip("/")

    def is_file(self) -> bool:
        """Whether the URI names a single file, not a folder (nor, in object storage, both)."""
        filesystem, base = self._opened
        info = self.attempt("looked at", "", lambda: filesystem.get_file_info(base))
        if info.type != pafs.FileType.File or self.is_local:
            return info.type == pafs.FileType.File
        if not isinstance(filesystem, pafs.PyFileSystem):
            below = pafs.FileSelector(base, recursive=False, allow_not_found=True)
            return not self.attempt("listed", "", lambda: filesystem.get_file_info(below))
        facts = self.attempt("looked at", "", lambda: filesystem.handler.fs.info(base))
        return facts.get("mimetype") != "text/html"  # by HTTP a folder is a page that lists it

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if there is none."""
        filesystem, path = self._opened[0], self._path(name)
        info = self.attempt("looked at", name, lambda: filesystem.get_file_info(path))
        return info.size if info.type == pafs.FileType.File else None

    def open(self, name: str) -> pa.NativeFile:
        """A seekable file. Its later reads are not tried again: wrap what uses it in `attempt`."""
        return self._opened[0].open_input_file(self._path(name))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes start..stop-1 of a file, or all from `start` on. Raises UserError if the file ends before `stop`."""

        def call() -> bytes:
            with self.open(name) as file:
                size = file.size()  # known since it was opened; S3 refuses to begin behind it
                return file.read_at((size if stop is None else min(stop, size)) - start, start) if start < size else b""

        found = self.attempt("read", name, call)
        if stop is not None and len(found) != stop - start:
            raise UserError(
                f"{self.place(name)} has changed: of its bytes {start} to {stop} only {len(found)} are there; put it back as "
                "it was, or begin anew"
            )
        return found

    def write(self, name: str, content: bytes) -> None:
        """Write a file whole or not at all, and see that as many bytes are stored.

        A local file is written under another name and renamed. An object appears when its upload is complete; if the
        reply to that is lost, the object is compared with `content` before the upload is called a failure. One object
        over another, longer than a part (10 MB): if the storage refuses the upload, both may be gone.
        """
        if self.is_local:
            self.attempt("written", name, lambda: _write_local(Path(self._path(name)), content))
            return
        filesystem, path = self._opened[0], self._path(name)

        def call() -> None:
            try:
                with filesystem.open_output_stream(path) as file:
                    file.write(content)
            except OSError:
                if not self._holds(name, content):
                    self._remove_if_empty(name)
                    raise
            stored = filesystem.get_file_info(path).size
            if stored != len(content):
                raise OSError(f"{stored} bytes are stored of {len(content)} that were sent")

        if isinstance(filesystem, pafs.PyFileSystem):
            with contextlib.suppress(NotImplementedError, OSError):  # where folders are real, as with sftp
                filesystem.create_dir(path.rpartition("/")[0], recursive=True)
        self.attempt("written", name, call)

    def _holds(self, name: str, content: bytes) -> bool:
        with contextlib.suppress(OSError):
            with self.open(name) as file:
                pieces = (content[start : start + PIECE_BYTES] for start in range(0, len(content), PIECE_BYTES))
                return file.size() == len(content) and all(file.read(len(piece)) == piece for piece in pieces)
        return False

    def _remove_if_empty(self, name: str) -> None:
        """What pyarrow leaves of an upload in parts that the storage did not let it begin."""
        with contextlib.suppress(OSError, UserError):
            if self._opened[0].get_file_info(self._path(name)).size == 0:
                self.delete(name)

    def delete(self, name: str) -> None:
        """Remove a file; that it is gone already is fine."""
        path = self._path(name)
        in_s3 = self._opened[0].type_name == "s3"
        delete = _s3fs(self.uri).rm_file if in_s3 else self._opened[0].delete_file

        def call() -> None:
            try:
                delete(path)
            except FileNotFoundError:
                pass
            except Exception as error:
                if in_s3 and type(error).__module__ == "botocore.exceptions":  # no OSError: no credentials, no connection
                    raise OSError(one_line(error)) from error
                raise

        self.attempt("deleted", name, call)

    def attempt(self, what: str, name: str, call: Callable[[], T]) -> T:
        """`call()`, tried again after a pause where the storage failed in a way that may pass.

        Raises UserError that says that `name` cannot be `what` ("read", "written"), why, and what cures it; StorageFailing
        where time alone may cure it. Errors
        that are not the storage's (a damaged Parquet file) pass through.
        """
        tries = 1 if self.is_local else TRIES
        for attempt in range(tries):
            try:
                return call()
            except (UserError, pa.ArrowException, MemoryError):  # ArrowException: OSError of pyarrow is none
                raise
            except Exception as error:
                if not isinstance(error, OSError) and isinstance(self._opened[0], pafs.LocalFileSystem | pafs.S3FileSystem):
                    raise  # ours; what fsspec's filesystems raise is of many kinds
                cure = self._cure(error, name)
                if cure or attempt == tries - 1:
                    raise (UserError if cure else StorageFailing)(self._told(what, name, error, cure)) from error
            time.sleep(FIRST_PAUSE_SECONDS * 2**attempt * random.uniform(0.5, 1.5))
        raise AssertionError("the last try returns or raises")

    def _told(self, what: str, name: str, error: Exception, cure: str) -> str:
        tried = "" if cure or self.is_local else f" after {TRIES} tries"
        cure = cure or "see that the storage can be reached and is well, then go on"
        return f"{self.place(name)} cannot be {what}{tried} ({one_line(error)}); {cure}"

    def _cure(self, error: Exception, name: str) -> str:
        """What a user can do where another try cannot help; "" where it may."""
        text = str(error)
        for own in (name, self._opened[1]):  # a folder may be called Forbidden
            text = text.replace(own, "") if own else text
        if "NO_SUCH_BUCKET" in text or "NoSuchBucket" in text or "Bucket '" in text and "not found" in text:
            return "there is no such bucket: check its name, the endpoint and the region"
        if isinstance(error, FileNotFoundError) or "NO_SUCH_KEY" in text or "RESOURCE_NOT_FOUND" in text:
            return "it does not exist: put it back as it was, or begin anew"
        if isinstance(error, NotImplementedError):
            return "this kind of storage does not permit it: name another"
        if any(word in text for word in DENIED) or isinstance(error, PermissionError):
            if self.is_local:
                return "mend its permissions"
            return (
                "the storage refuses the credentials it was given, or they do not permit this: check AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or the machine's role (s3:GetObject and s3:ListBucket to read, "
                "s3:PutObject and s3:DeleteObject to write)"
            )
        if any(word in text for word in FULL):
            return "the storage is full, or a quota is reached: make room"
        if isinstance(error, OSError) and error.errno in (28, 122, 30):  # no space, quota, read-only
            return "make room or mend the storage"
        return ""


# Parts of the messages of pyarrow (upper case) and of s3fs and HTTP; the last is rclone's to a request without a signature.
# 400 is what AWS answers to an expired token, with no more words than that where a HEAD asks.
DENIED = ("ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH", "EXPIRED_TOKEN", "INVALID_CLIENT_TOKEN_ID",
          "InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied", "Forbidden", "HTTP status 403",
          "HTTP status 400", "Unable to locate credentials", "UnsupportedAlgorithm")  # fmt: skip
# 507 is MinIO's and Ceph's; AWS itself is never full.
FULL = ("HTTP status 507", "StorageFull", "QuotaExceeded", "InsufficientStorage")


def one_line(error: BaseException) -> str:
    """The text of an error in one line, or its class if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


@lru_cache(maxsize=64)
def _open(uri: str) -> tuple[pafs.FileSystem, str]:
    """The filesystem and the path in it. Raises UserError for what can be told without the network."""
    scheme, mark, _ = uri.partition("://")
    if not mark:
        return pafs.LocalFileSystem(), uri
    if scheme in S3_SCHEMES:
        return _open_s3(uri)
    try:
        filesystem, path = fsspec.core.url_to_fs(uri)
    except (ValueError, ImportError) as error:
        cure = "check the URI" if isinstance(error, ValueError) else "install it on every machine of the run"
        raise UserError(f"{uri}: {one_line(error)}; {cure}") from error
    return pafs.PyFileSystem(pafs.FSSpecHandler(filesystem)), path.rstrip("/")


@lru_cache(maxsize=4)
def _s3fs(uri: str) -> fsspec.AbstractFileSystem:
    """For deleting alone: pyarrow would write an empty object in place of the folder, and want the right to."""
    import s3fs

    _, settings = s3_settings(uri)
    endpoint = settings["endpoint_override"] and f"{settings['scheme']}://{settings['endpoint_override']}"
    client = {"endpoint_url": endpoint, "region_name": settings["region"]}
    return s3fs.S3FileSystem(anon=settings["anonymous"], client_kwargs=client, skip_instance_cache=True)


def _open_s3(uri: str) -> tuple[pafs.FileSystem, str]:
    path, settings = s3_settings(uri)
    strategy = pafs.AwsStandardS3RetryStrategy(max_attempts=3)
    return pafs.S3FileSystem(
        connect_timeout=CONNECT_SECONDS,
        request_timeout=STALLED_SECONDS,
        retry_strategy=strategy,
        allow_delayed_open=True,  # a small object is one request, not the three of a multipart upload
        **settings,
    ), path


def s3_settings(uri: str) -> tuple[str, dict]:
    """bucket/prefix, and what pyarrow's client is told."""
    parsed = urlsplit(uri, allow_fragments=False)
    options = dict(parse_qsl(parsed.query, keep_blank_values=True))
    unknown = set(options) - set(S3_OPTIONS)
    empty = [name for name, value in options.items() if not value]
    if unknown or empty or not parsed.netloc or options.get("anonymous", "true") not in ("true", "false"):
        what = (
            f"unknown option {min(unknown)!r} (a ? in a name is written %3F)"
            if unknown
            else f"option {empty[0]!r} has no value"
            if empty
            else "anonymous is true or false"
            if parsed.netloc
            else "there is no bucket in it"
        )
        raise UserError(f"{uri.partition('?')[0]}: {what}; write s3://bucket/prefix, with options of {', '.join(S3_OPTIONS)}")
    profile = _profile()
    endpoint = options.get("endpoint_override") or next(
        (os.environ[name] for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL") if os.environ.get(name)),
        profile.get("endpoint_url", ""),
    )
    named, mark, host = endpoint.rpartition("://")
    region = (
        options.get("region")
        or os.environ.get("AWS_REGION")
        or os.environ.get("AWS_DEFAULT_REGION")
        or profile.get("region")
        or ("us-east-1" if endpoint else None)
    )
    if region is None:
        with contextlib.suppress(OSError):  # one question to AWS; without an answer the client has its own default
            region = pafs.resolve_s3_region(parsed.netloc)
    return f"{parsed.netloc}{unquote(parsed.path)}".rstrip("/"), {
        "anonymous": options.get("anonymous") == "true",
        "region": region,
        "scheme": options.get("scheme") or (named if mark else "https"),
        "endpoint_override": host.rstrip("/") or None,
    }


def _profile() -> dict[str, str]:
    """Region and endpoint of the AWS profile in force; pyarrow reads only its credentials."""
    import botocore.exceptions
    import botocore.session  # half a second: only for S3

    try:
        return botocore.session.get_session().get_scoped_config()
    except botocore.exceptions.BotoCoreError as error:
        raise UserError(f"the AWS configuration cannot be used: {one_line(error)}; mend it or unset AWS_PROFILE") from error


def _write_local(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def _local_files(root: Path) -> list[Entry]:
    """All files below a folder, links followed. Raises UserError for a folder that is reached twice by links."""
    if not root.is_dir():
        return []
    found, folders, reached = [], [""], {_identity(root): ""}
    while folders:
        folder = folders.pop()
        try:
            for entry in _scanned(root / folder):
                name = f"{folder}{entry.name}"
                if any("\ud800" <= letter <= "\udfff" for letter in name):  # how Python marks undecodable bytes
                    raise UserError(f"{root}: the file name {name!r} is not valid UTF-8; rename it")
                if not entry.is_dir():
                    facts = entry.stat()
                    found.append(Entry(name, facts.st_size, facts.st_mtime_ns))
                    continue
                other = reached.setdefault(_identity(entry.path), name)
                if other != name:
                    raise UserError(f"{root}: {name} and {other or '.'} are one folder, by a link; remove the link")
                folders.append(name + "/")
        except OSError as error:
            raise UserError(f"{root / folder} cannot be listed ({error}); repair its links or permissions") from error
    return sorted(found)


def _scanned(folder: Path) -> Iterator[os.DirEntry]:
    """Names with a leading dot left out: they are nobody's data, and what they link to is not followed."""
    with os.scandir(folder) as entries:
        yield from (entry for entry in entries if not entry.name.startswith("."))


def _identity(folder: str | Path) -> tuple[int, int]:
    facts = os.stat(folder)
    return facts.st_dev, facts.st_ino
