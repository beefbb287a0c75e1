"""`moco-ray pack`: any data set to Parquet shards of checked images in one global random order [ray.data].

Responsible for carrying the passes as Ray Data tasks, for going on after an interruption, for what may lie in the target,
and for what is written about the result. Not responsible for what a task does (pack_passes.py).

Every row has a uniform, drawn from (seed, its number in the source); the packed data set is the source sorted by it.
- Scatter: a task reads a run of chunks, decodes every image, and writes one object: for each target shard the rows
  whose uniform falls into it. Beside it lie the digests of the source's bytes, bucketed.
- Duplicates: a task for each bucket of digests finds equal images, without any process holding all digests.
- Gather: a task for each shard reads its slice of every object, sorts it and writes the shard.
Ray Data's own random_shuffle will not do: it goes through the object store, which spills once the data outgrow it, and
what it has done is lost when the job is. Here a task reads up to 128 MB of source
(one row group if that is larger) or a shard of 256 MB, for which it needs 0.7 GB beside the 0.7 GB of its libraries,
and leaves a whole object and a report, written last: a second run takes what is there. Bytes do not depend on the number
of CPUs, on the order of tasks or on interruptions.
The price is one read by range for each scatter task and shard: 0.7 million for ImageNet (150 GB), 31 million of 32 kB
for 1 TB. Far beyond that, larger tasks and shards are called for.
"""

import hashlib
import json
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TextIO

import numpy as np
import pyarrow as pa
import ray
import ray.data
from ray.exceptions import RayError

from moco_ray.data.listing import OURS, UNFINISHED, find_data
from moco_ray.data.on_ray import spread, user_error
from moco_ray.data.pack_passes import PARTS, SHARD, Job, PackOptions, duplicates, gather, lines, plan, scatter, versions
from moco_ray.data.shards import make_manifest
from moco_ray.data.slices import Parts, side_by_side
from moco_ray.data.storage import Store
from moco_ray.data.survey import PACKED, PACKED_MANIFEST, build_manifest
from moco_ray.errors import UserError
from moco_ray.stages import Stages

BAD_ROWS = OURS + "bad_rows.jsonl"
BAD_ROWS_LISTED = 100_000  # the first of them; all are counted
OWN = re.compile(rf"part-\d{{5,}}\.parquet|{OURS}.*")


def pack(source_uri: str, target_uri: str, options: PackOptions, out: TextIO | None = None) -> dict[str, Any]:
    """Pack a data set, or go on where an earlier call with the same options stopped. Needs a running Ray.

    Returns what pack.json holds, and `already_there` if it was whole before. Rows that cannot be decoded are left out,
    counted and listed. Raises UserError if the source cannot be read or has no image at all, if the target holds
    something else, or was begun with other options.
    """
    names, target = refuse_unfit(source_uri, target_uri), Store.at(target_uri)
    job = plan(build_manifest(source_uri, options.image_column, spread), target, options)
    finished = _refuse_other(job, names)
    if finished:
        return {**finished, "already_there": True}
    if PACKED not in names:  # otherwise only the cleaning up was interrupted
        target.write(UNFINISHED, lines([job.identity]))
        _carry(job, out or sys.stderr)
    left = [entry.name for entry in target.list() if entry.name.startswith(PARTS)]
    side_by_side(target.delete, left)
    target.delete(UNFINISHED)
    return {**json.loads(target.read(PACKED)), "already_there": False}


# What is there already


def refuse_unfit(source_uri: str, target_uri: str) -> set[str]:
    """The names in the target. Raises UserError for what can be told at once, without a Ray: no source, a foreign target."""
    source, target = Store.at(source_uri), Store.at(target_uri)
    if source.holds(target):
        raise UserError(
            f"the target {target.place('')} lies in the source; choose a folder outside of {source.place('')}"
        )
    find_data(source)
    return _refuse_foreign(target)


def _refuse_foreign(target: Store) -> set[str]:
    """The names in the target. Raises UserError if anything but a packed data set, whole or begun, lies there."""
    names = {entry.name for entry in target.list() if not re.search(r"(^|/)\.", entry.name)}
    foreign = sorted(name for name in names if not OWN.fullmatch(name))
    if not names & {PACKED, UNFINISHED}:
        foreign = foreign or sorted(names)
    if foreign:
        raise UserError(
            f"{target.place(foreign[0])} was not written by this command ({len(foreign)} such files); choose an empty or "
            "new folder as the target"
        )
    return names


def _refuse_other(job: Job, names: set[str]) -> dict | None:
    """pack.json if all is done. Raises UserError if what is there has another identity, or lacks shards."""
    target, done = job.target, UNFINISHED not in names
    if not names:
        return None
    state = PACKED if done else UNFINISHED
    try:
        held = json.loads(target.read(state))
        held = dict(held["identity"] if done else held)
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{target.place(state)} was not written by this command; choose an empty or new folder"
        ) from error
    now = json.loads(json.dumps(job.identity))
    other = [key for key in sorted(now.keys() | held.keys()) if now.get(key) != held.get(key)]
    if done:  # what other versions would write does not matter any more
        other = [key for key in other if key != "versions"]
    if other:
        told = "; ".join(f"{key} is {now.get(key)!r}, and was {held.get(key)!r}" for key in other)
        raise UserError(
            f"{target.place('')} {'was packed' if done else 'was begun'} with other settings: {told}. Give those again, choose "
            "another target, or delete this one"
        )
    if not done:
        return None
    build_manifest(target.uri)  # refuses shards that are not those that were written
    return json.loads(target.read(PACKED))


# The passes


def _carry(job: Job, out: TextIO) -> None:
    """All passes, then what is written about the result."""
    scattered = _run(job, "scatter", len(job.cuts) - 1, partial(scatter, job), out)
    total = sum((Counter(report["counts"]) for report in scattered), Counter())
    bad = sum((Counter(report["bad"]) for report in scattered), Counter())
    if not total["rows"]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(bad.items()))
        raise UserError(f"none of the {job.manifest.rows} rows of {job.manifest.root} is an image ({kinds})")
    rows, digests = (parts_of(job, scattered, suffix) for suffix in (".arrow", ".digests"))
    compared = _run(job, "duplicates", job.buckets, partial(duplicates, job, digests), out)
    dropped = parts_of(job, compared, ".rows") if job.options.drop_duplicates else None
    labelled = total["labelled"] > 0
    gathered = _run(job, "part", job.shards, partial(gather, job, rows, dropped, labelled), out)
    total["duplicates"] = sum(report["duplicates"] for report in compared)
    kept = sum(report["rows"] for report in gathered)
    assert kept == total["rows"] - total["duplicates"] * job.options.drop_duplicates, (kept, total)
    _write_bad_rows(job, scattered)
    job.target.write(PACKED_MANIFEST, _manifest(job, gathered))
    job.target.write(PACKED, json.dumps(_facts(job, total, bad, gathered), indent=1).encode())


def parts_of(job: Job, reports: list[dict], suffix: str) -> Parts:
    found = {name: size for report in reports for name, size in report["objects"].items() if name.endswith(suffix)}
    slices = job.buckets if suffix == ".digests" else job.shards
    of = hashlib.sha256(json.dumps(job.identity).encode()).hexdigest()
    return Parts(job.target, tuple(found), tuple(found.values()), slices, of)


# Running a pass


def _run(job: Job, name: str, count: int, work: Callable[[int], dict], out: TextIO) -> list[dict]:
    """The reports of tasks 0 .. count-1, of which only those are run that have left none."""
    reports = _done(job.target, name, count)
    left = [task for task in range(count) if task not in reports]
    what = {"scatter": "reading", "duplicates": "comparing", "part": "writing shards"}[name]
    with Stages(out) as at:
        at(what, len(reports), count, "tasks")
        for task, report in _tasks(job, work, left):
            reports[task] = report
            at(what, len(reports), count, "tasks")
    return [reports[task] for task in range(count)]


def _done(target: Store, name: str, count: int) -> dict[int, dict]:
    """The reports that lie there, of tasks whose objects have the size that they say."""
    sizes = {entry.name: entry.bytes for entry in target.list()}
    there = [task for task in range(count) if f"{PARTS}{name}-{task:05d}.json" in sizes]

    def first_line(task: int) -> dict:
        return json.loads(target.read(f"{PARTS}{name}-{task:05d}.json").partition(b"\n")[0])

    reports = dict(zip(there, side_by_side(first_line, there), strict=True))
    return {t: r for t, r in reports.items() if all(sizes.get(o) == size for o, size in r["objects"].items())}


def _tasks(job: Job, work: Callable[[int], dict], numbers: list[int]) -> Iterator[tuple[int, dict]]:
    """Task and report, as tasks end. Raises the UserError that a task raised."""
    if not numbers:
        return
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # what matters is raised; the job prints its own progress
    shared, expected = ray.put(work), job.identity["versions"]

    def run(block: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        if versions() != expected:
            raise UserError(
                f"a machine of the cluster has {versions()}, and the driver has {expected}; give all the same environment"
            )
        call = ray.get(shared)
        for index in block["id"].tolist():
            yield {"report": np.array([json.dumps([numbers[index], call(numbers[index])])])}

    tasks = ray.data.range(len(numbers), override_num_blocks=len(numbers)).map_batches(run, batch_size=None, num_cpus=1)
    tasks.context.enable_progress_bars = tasks.context.print_on_execution_start = False
    try:
        for batch in tasks.iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=0):
            yield from (tuple(json.loads(text)) for text in batch["report"].tolist())
    except RayError as error:
        if (mistake := user_error(error)) is not None:
            raise mistake from None
        raise


# What is written about the result


def _write_bad_rows(job: Job, scattered: list[dict]) -> None:
    """One line of JSON for each row that was left out, in the order of the source, up to BAD_ROWS_LISTED."""
    lines: list[bytes] = []
    for task, report in enumerate(scattered):
        if report["bad"] and len(lines) < BAD_ROWS_LISTED:
            lines += job.target.read(f"{PARTS}scatter-{task:05d}.json").splitlines()[1:]
    job.target.write(BAD_ROWS, b"".join(line + b"\n" for line in lines[:BAD_ROWS_LISTED]))


def _manifest(job: Job, gathered: list[dict]) -> memoryview:
    """The manifest of the packed shards, as survey.py would make it of their footers."""
    full = [(SHARD.format(shard), report["row_groups"]) for shard, report in enumerate(gathered) if report["rows"]]
    file = np.repeat(np.arange(len(full)), [len(groups) for _, groups in full])
    part = np.concatenate([np.arange(len(groups)) for _, groups in full])
    rows, sizes = np.concatenate([np.array(groups, np.int64) for _, groups in full]).T
    names, none = pa.array([name for name, _ in full], pa.string()), np.full(len(file), -1)
    sink, classes = pa.BufferOutputStream(), job.manifest.classes  # what the numbers of labels mean
    make_manifest(job.target.uri, "parquet", "image", names, file, part, rows, sizes, file * 0, none, classes, []).save(sink)
    return memoryview(sink.getvalue())


def _facts(job: Job, total: Counter, bad: Counter, gathered: list[dict]) -> dict[str, Any]:
    """What pack.json holds."""
    shards = {
        name: {"rows": report["rows"], "bytes": size, "sha256": report["sha256"]}
        for report in gathered
        for name, size in report["objects"].items()
    }
    options = job.options
    changed = f"larger images re-encoded as JPEG: short side {options.short_side}, quality {options.quality}, 4:2:0"
    return {
        "identity": job.identity,
        "source": job.manifest.store.place(""),
        "source_warnings": list(job.manifest.warnings),
        "rows_in": job.manifest.rows,
        "rows": sum(report["rows"] for report in gathered),
        "bad": dict(sorted(bad.items())),
        "bad_listed": min(bad.total(), BAD_ROWS_LISTED),
        **{what: total[what] for what in ("duplicates", "made_baseline", "kept_progressive", "re_encoded", "labelled")},
        "change_of_the_data": changed if options.short_side is not None else "",
        "source_bytes": total["source_bytes"],
        "bytes": sum(shard["bytes"] for shard in shards.values()),
        "classes": list(job.manifest.classes),
        "shards": shards,
    }


def summary(facts: dict[str, Any], target_uri: str) -> str:
    """What `pack` returned, for people."""
    bad, options = facts["bad"], facts["identity"]
    missing = facts["kept_progressive"] and options["versions"]["turbojpeg"] == "none"
    hint = " (for that, install moco_ray[pack])" if missing else ""
    kinds = ", ".join(f"{count} {kind}" for kind, count in bad.items())
    listed = f" ({kinds}; {'the first ' if sum(bad.values()) > facts['bad_listed'] else ''}listed in {BAD_ROWS})"
    dropped = "left out" if options["drop_duplicates"] else "kept; --drop-duplicates leaves them out"
    lines = [
        f"{target_uri} was packed before, with the same settings: nothing was done" if facts["already_there"] else "",
        f"rows       {facts['rows_in']} in, {facts['rows']} packed, {facts['labelled']} with a label",
        f"bad        {sum(bad.values())}{listed if bad else ''}",
        f"duplicates {facts['duplicates']}" + (f" ({dropped})" if facts["duplicates"] else ""),
        f"JPEG       {facts['made_baseline']} progressive made baseline without loss, {facts['kept_progressive']} kept "
        f"progressive{hint}",
        f"re-encoded {facts['re_encoded']}, lossy: {facts['change_of_the_data']}"
        if facts["change_of_the_data"]
        else "",
        f"size       {facts['source_bytes'] / 1e6:.1f} MB of images in, {facts['bytes'] / 1e6:.1f} MB in "
        f"{len(facts['shards'])} shards",
        *(f"warning: {text}" for text in facts["source_warnings"] if "moco-ray pack" not in text),  # it is packed now
        f"next: moco-ray pretrain RECIPE --data {target_uri}",
    ]
    return "\n".join(line for line in lines if line)
