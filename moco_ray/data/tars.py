"""WebDataset tars: where their samples lie, and the samples of a run of members.

Responsible for the index of a tar (made by one pass over its headers) and for cutting a byte range into samples, by
one rule for both. Not responsible for decoding, nor for what a label means.

A sample is a run of members with the same name up to the first dot of the last part, as in the WebDataset format:
`n01/0007.jpg`, `n01/0007.cls`. One image makes it a row. Where a sample holds several images and not exactly one has a
plain suffix (`IMG.1.jpg`, `IMG.2.jpg`), each image is a row of its own, so that dots in names lose none.
"""

import io
import itertools
import json
import tarfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from moco_ray.data.listing import IMAGE_SUFFIXES, Index, labels_of
from moco_ray.data.storage import Entry, Store
from moco_ray.errors import UserError

CHUNK_ROWS, CHUNK_BYTES = 128, 32 << 20  # a chunk ends with the sample that reaches either
LOCAL_BLOCK_BYTES, REMOTE_BLOCK_BYTES = 16 << 10, 8 << 20
TAR_BLOCK = 512  # bytes; headers and data begin at multiples of it


class Sample(NamedTuple):
    """One row of a tar."""

    key: str  # name without suffixes
    image: bytes
    fields: dict[str, bytes]  # the other members by suffix, in lower case and without its dot: "cls", "json"


def scan_tar(store: Store, entry: Entry) -> Index:
    """Index one tar by its headers. From object storage that is one full read of it, in blocks of 8 MiB.

    A tar that is cut short or damaged keeps the samples before that point; `damage` says where. Raises UserError if
    it cannot be read or is no tar at all.
    """
    block_bytes = LOCAL_BLOCK_BYTES if store.is_local else REMOTE_BLOCK_BYTES
    chunks: list[tuple[int, int, int, tuple[int, int] | None]] = []
    rows, labels, begin, end = 0, [], 0, 0

    def close(stop: int) -> None:
        nonlocal rows, labels, begin
        if rows:
            span = (min(labels), max(labels)) if len(labels) == rows else None
            chunks.append((rows, stop - begin, begin, span))
        rows, labels, begin = 0, [], stop

    with _Blocks(store, entry, block_bytes) as file:
        try:
            archive = tarfile.open(fileobj=file, mode="r:")
        except tarfile.TarError as error:
            if entry.bytes == 0:
                return _index([], "it has 0 bytes")
            raise UserError(f"{store.place(entry.name)} is no tar ({error}); write it again or remove it") from error
        # Labels are read as they pass by: to go back for them would read their blocks again.
        members = ((member, _cls(archive, member)) for member in _whole_members(archive, entry.bytes))
        for _, found in itertools.groupby(members, key=lambda pair: _key(pair[0].name)):
            sample, values = zip(*found, strict=True)
            images = _images(sample)
            labels += [value for value in values if value is not None][:1] * len(images)
            rows += len(images)
            end = min(_end(sample[-1]), entry.bytes)  # a tar may be cut within the padding of its last member
            if rows >= CHUNK_ROWS or end - begin >= CHUNK_BYTES:
                close(end)
        close(end)
        damage = _damage(archive, file, entry.bytes)
    return _index(chunks, damage)


def _index(chunks: list[tuple[int, int, int, tuple[int, int] | None]], damage: str) -> Index:
    rows, sizes, offsets = (np.array([chunk[i] for chunk in chunks], np.int64) for i in range(3))
    return Index(rows, sizes, offsets, labels_of(".cls", rows, [chunk[3] for chunk in chunks]), damage)


def read_samples(store: Store, name: str, offset: int, length: int) -> list[Sample]:
    """The rows of a chunk, by one range read. Raises UserError if the tar is not what it was when it was indexed."""
    content = store.read(name, offset, offset + length)
    found = []
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            members = _whole_members(archive, length)
            for key, group in itertools.groupby(members, key=lambda member: _key(member.name)):
                sample = list(group)
                images = _images(sample)
                fields = {_suffix(m.name): archive.extractfile(m).read() for m in sample if m not in images}
                for image in images:
                    own = key if len(images) == 1 else image.name.rpartition(".")[0]
                    found.append(Sample(own, archive.extractfile(image).read(), fields))
    except tarfile.TarError as error:
        raise changed(store, name, str(error)) from error
    return found


def label_of(sample: Sample, label_column: str) -> int | None:
    """The whole number in `.cls`, or under `label_column` in `.json`; None if there is neither."""
    try:
        value = int(sample.fields["cls"]) if "cls" in sample.fields else json.loads(sample.fields.get("json", b"null"))
    except ValueError:
        return None
    value = value.get(label_column) if isinstance(value, dict) else value
    whole = isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
    return value if whole else None


def changed(store: Store, name: str, how: str) -> UserError:
    return UserError(
        f"{store.place(name)} has changed since its manifest was built ({how}); put it back as it was, or begin a new run"
    )


def _whole_members(archive: tarfile.TarFile, size: int) -> Iterator[tarfile.TarInfo]:
    """Visible files whose data lie in the archive to their last byte."""
    while True:
        try:
            member = archive.next()
        except tarfile.TarError:  # a cut header, or data that end early: `_damage` tells
            return
        archive.members.clear()  # tarfile keeps every member that it has seen
        if member is None or member.offset_data + member.size > size:
            return
        if member.isreg() and not member.name.rpartition("/")[2].startswith("."):
            yield member


def _images(sample: Sequence[tarfile.TarInfo]) -> list[tarfile.TarInfo]:
    images = [member for member in sample if member.name.lower().endswith(IMAGE_SUFFIXES)]
    plain = [member for member in images if "." not in _suffix(member.name)]
    return plain if len(plain) == 1 else images


def _key(name: str) -> str:
    folder, slash, last = name.rpartition("/")
    return f"{folder}{slash}{last.partition('.')[0]}"


def _suffix(name: str) -> str:
    return name.rpartition("/")[2].partition(".")[2].lower()


def _end(member: tarfile.TarInfo) -> int:
    return member.offset_data + -(-member.size // TAR_BLOCK) * TAR_BLOCK


def _cls(archive: tarfile.TarFile, member: tarfile.TarInfo) -> int | None:
    if _suffix(member.name) != "cls" or member.size > 32:
        return None
    try:
        return int(archive.extractfile(member).read())
    except ValueError:
        return None


def _damage(archive: tarfile.TarFile, file: "_Blocks", size: int) -> str:
    """What follows the last whole member: the end mark of a tar, or something that is no part of one."""
    at = archive.offset
    if at + TAR_BLOCK > size:
        return f"it is cut short at byte {size}" if at != size else "it has no end mark and may be cut short"
    file.seek(at)
    if file.read(TAR_BLOCK).strip(b"\0"):
        return f"it is damaged at byte {at}"
    while rest := file.read(LOCAL_BLOCK_BYTES):  # a hole of zeros looks like the end mark, and so does that of a joined tar
        if rest.strip(b"\0"):
            return f"it goes on after an end mark at byte {at}"
    return ""


class _Blocks(io.RawIOBase):
    """A stored file read in blocks, each with the retries of the store."""

    def __init__(self, store: Store, entry: Entry, block_bytes: int):
        self._store, self._entry, self._block_bytes = store, entry, block_bytes
        self._at, self._first, self._block = 0, 0, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._entry.bytes}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        stop = self._entry.bytes if size < 0 else min(self._at + size, self._entry.bytes)
        found = []
        while self._at < stop:
            if not self._first <= self._at < self._first + len(self._block):
                last = min(self._at + self._block_bytes, self._entry.bytes)
                self._first, self._block = self._at, self._store.read(self._entry.name, self._at, last)
            part = self._block[self._at - self._first : stop - self._first]
            found.append(part)
            self._at += len(part)
        return b"".join(found)
