"""The prediction of `show-plan --gpus` against steps that were really taken: one to four ranks, each on a machine of its own.

    python -m tests.bench.scaling            # as root, 4 minutes on two cores; writes tests/bench/results/scaling.json and scaling.md

A machine is a network namespace on one bridge, its cable limited in both directions (`tc tbf`), and a fixed share of a core
(cgroup), so that ranks do not take computing time from each other. Caches and memory they do share: so all four machines
always compute, those that have no rank of a run train alone beside it, and all are equally slow. What runs is moco_ray.train
itself under gloo, without Ray and without input. The model is told what its user would measure: the steps of a rank alone with
two numbers of rows, and rate and latency of an all-reduce between two machines at each limit. Nothing of two, three or four
ranks that train together goes into it.
"""

import argparse
import contextlib
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moco_ray.cluster_facts import ClusterFacts
from moco_ray.data.batch import Batch
from moco_ray.learner import Learner
from moco_ray.plan import Plan, groups_of_rank, rows_of
from moco_ray.ranks import Ranks
from moco_ray.recipe import Recipe
from moco_ray.scaling import predict
from moco_ray.traffic import Load, rows_leaving, sent_by_all_reduce
from moco_ray.train import Outputs, train
from tests.synthetic import PLAIN, small_learner

MACHINES, CORES_OF_EACH = 4, 0.3  # 1.2 of two cores: the rest is for the kernel's side of the network, and for what else runs here
PERIOD_US = 5_000  # of the shares
LIMITS = {"unlimited": 0, "1 Gbit/s": 10**9, "200 Mbit/s": 2 * 10**8, "30 Mbit/s": 3 * 10**7}
WARM_STEPS, STEPS = 1, 5  # of each run; the second is a period of record and look, so that their cost is in the mean
ALONE_GROUPS = (2, 4)  # of 8: what a rank has at four ranks, and at two
PROBE_BYTES, PROBE_ROUNDS = 8 << 20, 3
RESULTS = Path(__file__).parent / "results"


class Case(NamedTuple):
    """A recipe and its network."""

    words: tuple[str, ...]
    small: bool  # the two convolutions of tests/synthetic.py instead of a ResNet
    limits: tuple[str, ...]  # of LIMITS: those at which what it sends matters


COMMON = (
    "schedule.steps=1000", f"run.log_every_steps={STEPS}", f"run.dictionary_every_steps={STEPS}", "run.images_every_steps=0",
    "run.checkpoint_every_steps=100000", "run.checkpoint_every_minutes=0", "run.memory_format=contiguous", "contrast.queue_keys=4096",
)  # fmt: skip
CASES = {
    "ResNet-10: gradients": Case(("encoder.backbone=resnet10", "encoder.stem=small_stride2", "batch.global_batch_size=32", "batch.bn_group_size=4", "augment.image_pixels=32"),
        False, ("unlimited", "1 Gbit/s", "200 Mbit/s")),
    "tiny network: crops": Case(
        ("encoder.feature_dim=512", "batch.global_batch_size=128", "batch.bn_group_size=16", "augment.image_pixels=128",
         *(f"augment.{key}={value}" for key, value in PLAIN.items())),
        True, ("unlimited", "200 Mbit/s", "30 Mbit/s")),
}  # fmt: skip


def plan_of(case: str, groups: int | None = None) -> Plan:
    """With so many of its BatchNorm groups, by default all."""
    recipe = Recipe.of_overrides([*COMMON, *CASES[case].words])
    if groups:
        recipe = Recipe.of_overrides([*COMMON, *CASES[case].words, f"batch.global_batch_size={groups * recipe.batch.bn_group_size}"])
    return Plan(recipe, 100_000)


def learner_of(case: str, plan: Plan) -> Learner:
    return small_learner(plan.recipe) if CASES[case].small else Learner.new(plan.recipe)


# What a rank does, in a process on its machine.


def sent_bytes() -> int:
    """Bytes that left this machine, headers included."""
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.lstrip().startswith("eth0:"))
    return int(line.partition(":")[2].split()[8])


def same_batch(plan: Plan, ranks: Ranks) -> Iterator[Batch]:
    """The same crops at every step: input is not the subject."""
    own, pixels = rows_of(plan, ranks.world, ranks.rank), plan.recipe.augment.image_pixels
    crops = torch.randint(0, 256, (len(own), 2, pixels, pixels, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(ranks.rank))
    for step in itertools.count():
        positions = torch.arange(own.start, own.stop) + step * plan.recipe.batch.global_batch_size
        yield Batch(0, crops, positions, positions)


class _Enough(Exception):
    pass


def steps(ranks: Ranks, case: str, groups: int | None, until: str = "") -> dict[str, float]:
    """Mean seconds of a step, and bytes that this machine sent in it; with `until`, steps until that file is there."""
    plan, marks = plan_of(case, groups), []

    def completed(step: int) -> bool:
        if until:
            if Path(until).exists():
                raise _Enough
            return False
        if step in (WARM_STEPS, WARM_STEPS + STEPS):
            marks.append((time.perf_counter(), sent_bytes()))
        if len(marks) == 2:
            raise _Enough
        return False

    with contextlib.suppress(_Enough):
        train(learner_of(case, plan), same_batch(plan, ranks), plan, ranks, Outputs(lambda *_: None, lambda *_: None, None, completed))
    if until:
        return {}
    (began, before), (ended, after) = marks
    return {"seconds": (ended - began) / STEPS, "bytes": (after - before) / STEPS}


def probe(ranks: Ranks) -> dict[str, float]:
    """Bytes a second that a rank sends in a long all-reduce, and the latency of a message in a short one."""
    found = {}
    for name, count, rounds in (("long", PROBE_BYTES // 4, PROBE_ROUNDS), ("short", 1, 30)):
        values, times = torch.ones(count), []
        for _ in range(rounds + 1):
            began = time.perf_counter()
            ranks.sum(values)
            times.append(time.perf_counter() - began)
        found[name] = statistics.mean(times[1:])
    return {"bytes_per_second": sent_by_all_reduce(PROBE_BYTES, ranks.world) / found["long"], "latency_seconds": found["short"] / 2}


def serve() -> None:
    """Orders come as lines of JSON; each is answered by one."""
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        order = json.loads(line)
        rank, world = order["rank"], order["world"]
        if world > 1:
            dist.init_process_group("gloo", init_method=f"file://{order['store']}", rank=rank, world_size=world)
        ranks = Ranks.current()
        answer = probe(ranks) if order["do"] == "probe" else steps(ranks, order["case"], order.get("groups"), order.get("until", ""))
        if world > 1:
            dist.destroy_process_group()
        print(json.dumps(answer), file=answers)


# What the model is told, and what it says.


def facts_of(runs: list[dict], case: str, limit: str) -> ClusterFacts:
    """From runs of ranks alone, and from all-reduces at this limit."""
    rows = plan_of(case).recipe.batch.bn_group_size
    few, many = ALONE_GROUPS
    times = {groups: statistics.median(r["seconds"] for r in runs if r["case"] == case and r.get("groups") == groups) for groups in ALONE_GROUPS}
    for_a_row = (times[many] - times[few]) / ((many - few) * rows)
    probes = [r for r in runs if r["ranks"] == 0 and r["limit"] == limit]
    network = {name: statistics.median(r[name] for r in probes) for name in ("bytes_per_second", "latency_seconds")}
    return ClusterFacts.model_validate({
        "gpu": {"images_per_second": 1 / for_a_row, "fixed_seconds": max(0.0, times[few] - few * rows * for_a_row)},
        "node": {"gpus": 1, "cores": 1000}, "network": network,
        "input": {"core_seconds_per_image": 1e-9, "bytes_per_image": 1e-9, "share_from_other_nodes": 0},
        "checkpoint": {"copy_bytes_per_second": 1e18},
    })  # fmt: skip


def bytes_sent(load: Load, ranks: int) -> float:
    """Of a step, by the model: crops, keys, gradients, of the rank that sends most."""
    plan, n = load.plan, load.plan.recipe.batch.bn_group_size
    owned = [groups_of_rank(plan.groups, ranks, rank) for rank in range(ranks)]
    keys = (ranks - 1) * len(owned[0]) * n * load.key_bytes
    return max(rows_leaving(plan, groups) for groups in owned) * load.crop_bytes + keys + sent_by_all_reduce(load.reduced_bytes, ranks)


def table(runs: list[dict]) -> list[str]:
    """Markdown: seconds a step as measured and as predicted, and the errors."""
    ranks = range(2, MACHINES + 1)
    lines = ["| what is sent | cable | " + " | ".join(f"{n} ranks" for n in ranks) + " |", "|---|---|" + "---|" * len(ranks)]
    errors, bare, bytes_off = [], [], []
    for case, (_, _, limits) in CASES.items():
        gradients = tuple(p.numel() * p.element_size() for p in learner_of(case, plan_of(case)).f_q.parameters())
        load = Load(plan_of(case), gradients)
        for limit in limits:
            cells = []
            for n in ranks:
                mine = [r for r in runs if (r["case"], r["limit"], r["ranks"]) == (case, limit, n)]
                seconds, sent = (statistics.median(r[name] for r in mine) for name in ("seconds", "bytes"))
                found = predict(load, facts_of(runs, case, limit), n)
                errors.append(found.step_seconds / seconds - 1)
                bare.append(found.parts.encoder / seconds - 1)
                bytes_off.append(bytes_sent(load, n) / sent - 1)
                cells.append(f"{seconds:.3f}, predicted {found.step_seconds:.3f} ({errors[-1]:+.0%})")
            lines.append(f"| {case} | {limit} | " + " | ".join(cells) + " |")
    middle = statistics.median(map(abs, errors))
    return [
        *lines, "",
        f"The error is {min(errors):+.0%} to {max(errors):+.0%}, in half of the cases within {middle:.0%}. Without a network in the model it would be {min(bare):+.0%} to "
        f"{max(bare):+.0%}. The bytes sent are predicted to {min(bytes_off):+.1%} to {max(bytes_off):+.1%} of what the interfaces counted, headers included.",
    ]  # fmt: skip


# The machines, and what is asked of them.


class Machines:
    """Namespaces on a bridge, each with a rank's process in it."""

    def __init__(self):
        self._hub = f"mh{os.getpid()}"
        self._names = [f"m{n}x{os.getpid()}" for n in range(MACHINES)]
        self._groups = [Path("/sys/fs/cgroup/cpu") / name for name in self._names]
        self._folder = tempfile.TemporaryDirectory()
        self._files = itertools.count()
        self._processes: list[subprocess.Popen] = []
        try:
            self._lay_cables()
            for name in self._names:
                words = ["ip", "netns", "exec", name, sys.executable, "-m", "tests.bench.scaling", "--serve"]
                self._processes.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1))
            for process, group in zip(self._processes, self._groups, strict=True):
                self._answer(process)
                group.mkdir()
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(int(CORES_OF_EACH * PERIOD_US)))
                (group / "cpu.shares").write_text("16384")  # before all else that runs here
                (group / "cgroup.procs").write_text(str(process.pid))
        except BaseException:
            self.close()
            raise

    def limit(self, bits_per_second: int) -> None:
        """Both directions of every cable; 0 for none."""
        burst = max(16_000, bits_per_second // 8 // 1000)  # a millisecond's
        shape = ["tbf", "rate", f"{bits_per_second}bit", "burst", str(burst), "limit", str(16 << 20)]
        for number, name in enumerate(self._names):
            for place, device in ((name, "eth0"), (self._hub, f"port{number}")):
                subprocess.run(["tc", "-n", place, "qdisc", "del", "dev", device, "root"], capture_output=True)
                if bits_per_second:
                    subprocess.run(["tc", "-n", place, "qdisc", "add", "dev", device, "root", *shape], check=True)

    def train(self, case: str, world: int) -> list[dict]:
        """The answers of the first `world` machines, while the others train alone."""
        done = self._new_file()
        beside = {"do": "steps", "case": case, "groups": 2, "until": done, "rank": 0, "world": 1}
        for process in self._processes[world:]:
            process.stdin.write(json.dumps(beside) + "\n")
        answers = self.ask(self._processes[:world], world, do="steps", case=case)
        Path(done).touch()
        for process in self._processes[world:]:
            self._answer(process)
        return answers

    def alone(self, case: str, groups: int) -> list[dict]:
        """The answers of all machines, each a world of one, at the same time."""
        return self.ask(self._processes, 1, do="steps", case=case, groups=groups)

    def probe(self) -> list[dict]:
        return self.ask(self._processes[:2], 2, do="probe")

    def ask(self, processes: list[subprocess.Popen], world: int, **order: Any) -> list[dict]:
        store = self._new_file()
        for rank, process in enumerate(processes):
            process.stdin.write(json.dumps({**order, "rank": rank if world > 1 else 0, "world": world, "store": store}) + "\n")
        return [self._answer(process) for process in processes]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for group in self._groups:
            with contextlib.suppress(OSError):
                group.rmdir()
        for name in [*self._names, self._hub]:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
        self._folder.cleanup()

    def __enter__(self) -> "Machines":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _new_file(self) -> str:
        return f"{self._folder.name}/{next(self._files)}"

    @staticmethod
    def _answer(process: subprocess.Popen) -> dict:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("a rank ended; see above")
        return json.loads(line)

    def _lay_cables(self) -> None:
        def ip(*words: str) -> None:
            subprocess.run(["ip", *words], check=True)

        ip("netns", "add", self._hub)
        ip("-n", self._hub, "link", "add", "hub", "type", "bridge")
        ip("-n", self._hub, "link", "set", "hub", "up")
        for number, name in enumerate(self._names):
            ip("netns", "add", name)
            ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", f"port{number}", "netns", self._hub)
            ip("-n", self._hub, "link", "set", f"port{number}", "master", "hub", "up")
            ip("-n", name, "address", "add", f"10.79.0.{number + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")


def measure(rounds: int) -> list[dict]:
    """One record for each run: case, limit, ranks (0: each alone), groups, and what was measured."""
    found = []
    with Machines() as machines:
        for number, case, limit in ((n, case, limit) for n in range(rounds) for limit in LIMITS for case in CASES if limit in CASES[case].limits):
            machines.limit(LIMITS[limit])
            about = {"round": number, "limit": limit, "case": case}
            found.append({**about, "ranks": 0, **machines.probe()[0]})
            for groups in ALONE_GROUPS if not LIMITS[limit] else ():
                seconds = [answer["seconds"] for answer in machines.alone(case, groups)]
                found.append({**about, "ranks": 1, "groups": groups, "seconds": statistics.mean(seconds), "seconds_of_each": seconds})
            for ranks in range(2, MACHINES + 1):
                answers = machines.train(case, ranks)
                found.append({**about, "ranks": ranks, "seconds": max(a["seconds"] for a in answers), "bytes": max(a["bytes"] for a in answers)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    model = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    before = os.getloadavg()
    began = time.monotonic()
    found = {
        "cpu": model.partition(": ")[2], "cores": os.cpu_count(), "kernel": platform.release(), "torch": version("torch"),
        "cores_of_a_machine": CORES_OF_EACH, "load_average_before": before, "runs": measure(arguments.rounds),
        "load_average_after": os.getloadavg(), "seconds": round(time.monotonic() - began),
    }  # fmt: skip
    (RESULTS / "scaling.json").write_text(json.dumps(found, indent=1) + "\n")
    lines = table(found["runs"])
    (RESULTS / "scaling.md").write_text("\n".join(lines) + "\n")
    print(*lines, sep="\n")
    print(f"{found['seconds']} s")


if __name__ == "__main__":
    main()
