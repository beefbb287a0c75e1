"""The input plane's speed beside the usual pipeline's, in one run: milliseconds of one core an image (two views of it).

Run it from the repository's root, on an idle machine (about 20 s a round; photos.py says what to install first):

    .venv/bin/python tests/bench/input.py [--rounds N] [--json FILE]

All libraries have one thread, and this process one core. A round gives every case all photos, in an order drawn anew.
The measure is CPU time (user + system), since neighbours on a shared core move the clock's time; medians of the rounds,
and of the ratios within a round. The reference reads bytes, as ours does; its output is float32, ours uint8, for colour,
blur and normalisation are the device stage's (augment.py), which is *not* in our numbers: they are the CPU's work only.

The whole plane is `stream.batches` on a Ray of its own in another process, with one CPU for data tasks: their worker
process runs on the measured core, everything else of Ray and the consumer, which drops each batch, on the others. Two
measures of it, from the last batch of one epoch to the last of a later one, so whole tasks and nothing of the start:
- clock: images by seconds, with one core for the tasks: sees gaps in which that core idles; the time that neighbours had
  the core is taken off, and printed. This is the one with a target;
- CPU: images by the CPU seconds of *all* its processes (workers, driver with executor and consumer, raylet, GCS, agents),
  most of which have the other cores to themselves in practice; blind to gaps in which the data core idles.
"""

import argparse
import hashlib
import io
import json
import multiprocessing
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import photos
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch
from PIL import Image, ImageFilter, features
from torchcodec.decoders import decode_image
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms import transforms as v1

from moco_ray.data.decode import decode
from moco_ray.data.segment import Source, _crop_rows
from moco_ray.data.stream import batches
from moco_ray.data.survey import build_manifest
from moco_ray.plan import Plan
from moco_ray.recipe import Recipe

PHOTOS = 240
SHORT_SIDE = 256
WORLD, GLOBAL_BATCH, GROUP = 8, 256, 32  # the published set-up: one rank's share, 32 rows a step
ROWS, ROW_GROUP = 4096, 64  # of the plane's data set: an epoch is one task of 512 rows for each rank
WARM_EPOCHS, MEASURED_EPOCHS = 1, 5  # and one more is begun, so that the last measured task does not drain the pipeline
REFERENCE = "a. PIL + torchvision v1, float32"
TARGETS = {"c. crop stage, originals": 6.0, "d. crop stage, packed": 13.0}
PLANE_TARGET = 0.8  # of the crop stage's rate

RECIPE = Recipe.parse(
    {
        "schedule": {"epochs": WARM_EPOCHS + MEASURED_EPOCHS + 1},
        "batch": {"global_batch_size": GLOBAL_BATCH, "bn_group_size": GROUP},
    }
)


class PilBlur:
    """Gaussian blur of a PIL image; sigma uniform in 0.1..2, as MoCo v2 has it."""

    def __call__(self, image: Image.Image) -> Image.Image:
        return image.filter(ImageFilter.GaussianBlur(radius=random.uniform(0.1, 2.0)))


def pil_two_views():
    """encoded -> two 3,224,224 float32: MoCo v2's augmentation as everyone writes it with torchvision."""
    mean, std = RECIPE.augment.mean, RECIPE.augment.std
    view = v1.Compose(
        [
            v1.RandomResizedCrop(224, scale=(0.2, 1.0)),
            v1.RandomApply([v1.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
            v1.RandomGrayscale(p=0.2),
            v1.RandomApply([PilBlur()], p=0.5),
            v1.RandomHorizontalFlip(),
            v1.ToTensor(),
            v1.Normalize(mean, std),
        ]
    )

    def two_views(encoded: bytes):
        image = Image.open(io.BytesIO(encoded)).convert("RGB")
        return view(image), view(image)

    return two_views


def tensor_two_views():
    """encoded -> two 3,224,224 float32 by torchvision v2 on uint8 tensors, image by image."""
    view = v2.Compose(
        [
            v2.RandomResizedCrop(224, scale=(0.2, 1.0), interpolation=InterpolationMode.BILINEAR, antialias=True),
            v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
            v2.RandomGrayscale(p=0.2),
            v2.RandomApply([v2.GaussianBlur(13, sigma=(0.1, 2.0))], p=0.5),  # 3 sigma on both sides
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(RECIPE.augment.mean, RECIPE.augment.std),
        ]
    )

    def two_views(encoded: bytes):
        image = decode_image(torch.frombuffer(bytearray(encoded), dtype=torch.uint8), mode="RGB")
        return view(image), view(image)

    return two_views


def crop_stage(images: list[bytes], epoch: int) -> None:
    """The very function that a data task calls for each of its steps, on rows that are read already."""
    source, rows_per_step = (
        Source(manifest=None, recipe=RECIPE, plan=None),
        GLOBAL_BATCH // WORLD,
    )  # asked for bad rows only
    for first in range(0, len(images), rows_per_step):
        step = images[first : first + rows_per_step]
        positions = np.arange(first, first + len(step))
        _crop_rows(source, epoch, positions, positions, step)


def for_each(work):
    """A case that does one image after the other, from a function of the encoded image."""

    def run(images: list[bytes], epoch: int) -> None:
        torch.manual_seed(epoch)
        random.seed(epoch)
        for encoded in images:
            work(encoded)

    return run


def cases(originals: list[bytes], packed: list[bytes]) -> dict:
    """Name of a case -> its work on a number of images, and the images."""
    only_decode = for_each(lambda encoded: decode(encoded, RECIPE.data.max_image_pixels))
    return {
        REFERENCE: (for_each(pil_two_views()), originals),
        "b. torchvision v2, tensors, float32": (for_each(tensor_two_views()), originals),
        "c. crop stage, originals": (crop_stage, originals),
        "d. crop stage, packed": (crop_stage, packed),
        "e. decode alone, originals": (only_decode, originals),
        "e. decode alone, packed": (only_decode, packed),
    }


def cpu_milliseconds(work, images: list[bytes], epoch: int) -> float:
    """CPU time of this process, in milliseconds an image."""
    before = time.process_time()
    work(images, epoch)
    return 1000 * (time.process_time() - before) / len(images)


def write_shards(images: list[bytes], folder: Path) -> None:
    """A Parquet data set of ROWS rows, the images in turn."""
    folder.mkdir()
    rows = [images[number % len(images)] for number in range(ROWS)]
    for shard, first in enumerate(range(0, ROWS, 1024)):
        table = pa.table({"image": rows[first : first + 1024]})
        pq.write_table(table, folder / f"{shard:02}.parquet", row_group_size=ROW_GROUP, compression="none")


def serve_plane(pipe, core: int, other_cores: set[int], ray_folder: str) -> None:
    """The plane's own process: a Ray on the other cores; measures the folder that it is sent, until that is None."""
    os.sched_setaffinity(0, other_cores)
    torch.set_num_threads(1)
    ray.init(
        num_cpus=1, include_dashboard=False, _temp_dir=ray_folder, object_store_memory=1 << 30, log_to_driver=False
    )
    pipe.send("ready")
    while (folder := pipe.recv()) is not None:
        pipe.send(measure_plane(folder, core))
    ray.shutdown()


def measure_plane(folder: str, core: int) -> dict[str, float]:
    """Rows, clock and CPU seconds of MEASURED_EPOCHS of one rank's batches; see the top of this file."""
    manifest = build_manifest(folder, "image")
    plan = Plan(RECIPE, manifest.rows)
    first = WARM_EPOCHS * plan.steps_per_epoch - 1
    last = first + MEASURED_EPOCHS * plan.steps_per_epoch
    rows, start, stop = 0, {}, {}
    for step, batch in enumerate(batches(manifest, RECIPE, plan, WORLD, 0, 0, head_start=False)):
        if step < first:
            pin_workers(core)
        elif step == first:
            start = {"seconds": time.perf_counter(), "core": busy_seconds(core), **processes()}
        elif step <= last:
            rows += len(batch.crops)
        if step == last:
            stop = {"seconds": time.perf_counter(), "core": busy_seconds(core), **processes()}
        del batch
    spent = {name: stop[name] - start.get(name, 0.0) for name in stop}
    spent["neighbours"] = max(0.0, spent.pop("core") - spent["cpu worker"])  # who else had the core
    return {"rows": rows, **spent}


def busy_seconds(core: int) -> float:
    """Seconds that a core has worked, for anybody, the hypervisor's other guests included."""
    line = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith(f"cpu{core} "))
    user, nice, system, _, _, interrupts, soft, steal, *_ = map(int, line.split()[1:])
    return (user + nice + system + interrupts + soft + steal) / os.sysconf("SC_CLK_TCK")


def processes() -> dict[str, float]:
    """CPU seconds of this process's tree by kind."""
    found: dict[str, float] = {}
    for pid in process_tree():
        try:
            kind = kind_of(pid)
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        found[f"cpu {kind}"] = found.get(f"cpu {kind}", 0.0) + sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    return found


def kind_of(pid: int) -> str:
    """Ray titles its workers "ray::" and their task or "IDLE"; its agents and actors too, which do no data task."""
    if pid == os.getpid():
        return "driver"
    command = Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace")
    if command.startswith("ray::") and "Agent" not in command and "Actor" not in command:
        return "worker"
    return "raylet" if command.endswith("/raylet") else "GCS" if command.endswith("/gcs_server") else "agents"


def process_tree() -> list[int]:
    """This process and all below it."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = [os.getpid()]
    for pid in found:  # grows as it is walked
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def pin_workers(core: int) -> None:
    """All threads of Ray's workers to one core: sched_setaffinity alone moves only the main one."""
    for pid in process_tree():
        try:
            if kind_of(pid) == "worker":
                for thread in os.listdir(f"/proc/{pid}/task"):
                    os.sched_setaffinity(int(thread), {core})
        except OSError:
            continue


def facts(images: dict[str, list[bytes]], core: int) -> dict:
    """What the numbers were measured on, and with."""
    model = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    names = ("torch", "torchvision", "torchcodec", "pillow", "numpy", "pyarrow", "ray", "moco_ray")
    return {
        "cpu": model.partition(": ")[2],
        "cores": os.cpu_count(),
        "measured_core": core,
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "kernel": platform.release(),
        "load_average_before": os.getloadavg(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in names},
                     "libjpeg_turbo of pillow": features.version_feature("libjpeg_turbo")},
        "photos": [photo._asdict() for photo in photos.PHOTOS],
        "images": {name: {"count": len(made), "mean_kilobytes": statistics.mean(map(len, made)) / 1000,
                          "sha256": hashlib.sha256(b"".join(made)).hexdigest()} for name, made in images.items()},
    }  # fmt: skip


def measure(rounds: int, images: dict[str, list[bytes]], core: int, other_cores: set[int]) -> list[dict]:
    """All numbers of all rounds: {case: ms} and {"f. plane, ...": what measure_plane says}."""
    work = cases(**images)
    for run, some in work.values():
        run(some[:32], 0)  # imports, first allocations
    with tempfile.TemporaryDirectory(prefix="bench", dir="/tmp") as folder:  # short: Ray's sockets lie in it
        planes = {f"f. plane, {name}": str(Path(folder) / name) for name in images}
        for made, place in zip(images.values(), planes.values(), strict=True):
            write_shards(made, Path(place))
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        plane = context.Process(target=serve_plane, args=(theirs, core, other_cores, f"{folder}/ray"))
        plane.start()
        theirs.close()  # so that its end is seen, should it fail
        pipe.recv()
        measured = []
        for number in range(1, rounds + 1):
            measured.append({})
            order = random.Random(number).sample([*work, *planes], len(work) + len(planes))
            for name in order:
                if name in planes:
                    pipe.send(planes[name])
                    measured[-1][name] = pipe.recv()
                else:
                    measured[-1][name] = cpu_milliseconds(*work[name], number)
            print(f"round {number} of {rounds}, load average {os.getloadavg()[0]:.1f}", file=sys.stderr)
        pipe.send(None)
        plane.join()
    return measured


def plane_milliseconds(plane: dict[str, float]) -> dict[str, float]:
    """Of one measurement, ms an image: CPU of all processes, of each kind, and the clock's less the neighbours' time."""
    kinds = {name: seconds for name, seconds in plane.items() if name.startswith("cpu ")}
    seconds = {"CPU of all": sum(kinds.values()), "clock": plane["seconds"] - plane["neighbours"]}
    return {name: 1000 * value / plane["rows"] for name, value in {**seconds, **kinds}.items()}


def table(measured: list[dict]) -> tuple[list[str], bool]:
    """Lines to print, and whether all targets are met."""
    lines = [f"{'':38}{'ms/image':>9}{'images/s':>10}{'x reference':>13}"]
    met = True

    def add(name: str, milliseconds: list[float], target: str = "") -> None:
        ratio = statistics.median(r[REFERENCE] / ms for r, ms in zip(measured, milliseconds, strict=True))
        middle = statistics.median(milliseconds)
        lines.append(f"{name:38}{middle:9.2f}{1000 / middle:10.0f}{ratio:13.2f}{target}")

    for name in sorted(measured[0]):
        if not name.startswith("f."):
            times = [r[name] for r in measured]
            ratio = statistics.median(r[REFERENCE] / r[name] for r in measured)
            met &= ratio >= TARGETS.get(name, 0.0)
            add(name, times, f"  target {TARGETS[name]:g}" if name in TARGETS else "")
            continue
        stage = {"f. plane, originals": "c. crop stage, originals", "f. plane, packed": "d. crop stage, packed"}[name]
        planes = [plane_milliseconds(r[name]) for r in measured]
        for measure_name, target in (("clock", f"; target {PLANE_TARGET:.0%}"), ("CPU of all", "")):
            share = statistics.median(r[stage] / p[measure_name] for r, p in zip(measured, planes, strict=True))
            met &= not target or share >= PLANE_TARGET
            said = f"  {share:.0%} of the crop stage's rate{target}"
            add(f"{name}: {measure_name}", [p[measure_name] for p in planes], said)
        kinds = sorted({kind for p in planes for kind in p if kind.startswith("cpu ")})
        parts = (f"{kind[4:]} {statistics.median(p.get(kind, 0.0) for p in planes):.3f}" for kind in kinds)
        lost = statistics.median(r[name]["neighbours"] / r[name]["seconds"] for r in measured)
        lines.append(f"{'':10}of it {', '.join(parts)}; neighbours had {lost:.1%} of the data core's time")
    return lines, met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="machine, versions, hashes and all numbers of all rounds")
    arguments = parser.parse_args()
    cores = os.sched_getaffinity(0)
    core = max(cores)
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    originals = photos.originals(PHOTOS)
    images = {"originals": originals, "packed": [photos.packed(encoded, SHORT_SIDE) for encoded in originals]}
    about = facts(images, core)
    measured = measure(arguments.rounds, images, core, cores - {core} or cores)
    about["load_average_after"] = os.getloadavg()
    if arguments.json:
        arguments.json.write_text(json.dumps({**about, "rounds": measured}, indent=1))
    lines, met = table(measured)
    sizes = ", ".join(f"{name} {made['mean_kilobytes']:.0f} KB" for name, made in about["images"].items())
    print(
        f"{about['cpu']}, torch kernels {about['torch_capability']}; {PHOTOS} images of {len(photos.PHOTOS)} photos: {sizes}"
    )
    print(*lines, "all targets met" if met else "a target is missed", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
