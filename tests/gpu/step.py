"""The step on a GPU: does it compute what a CPU computes, and how fast? CI does not run this: its machines have no GPU.

    python -m tests.gpu.step [--json FILE]      # on a machine with a GPU, under ten minutes; with two, NCCL is tried too
    python -m tests.gpu.step --cpu              # all of it with tiny sizes on a CPU, to see that the script itself runs

Prints one line a check, and leaves with 1 if one failed. Checks compare with a CPU in float64; rates are of random crops that lie on the
device, without reading or copying them. What needs a second GPU is skipped, and says so. Here it has been run with --cpu alone.
"""

import argparse
import contextlib
import itertools
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from moco_ray.data.augment import colour_stage
from moco_ray.learner import Learner
from moco_ray.method.batchnorm import GroupedBatchNorm2d
from moco_ray.method.contrast import info_nce
from moco_ray.method.encoder import use_float32_of
from moco_ray.method.optimizers import build_optimizer
from moco_ray.parts import Parts
from moco_ray.plan import Plan
from moco_ray.ranks import Ranks
from moco_ray.recipe import Optimizer, Recipe
from moco_ray.train import Outputs, train
from tests import synthetic
from tests.bench.step_ranks import batches, recipe_of, run_ranks
from tests.bench.step_whole import AUGMENT, ROWS, shares_of


class Size(NamedTuple):
    """What is measured."""

    backbone: str
    pixels: int
    rows: tuple[int, ...]
    queue_keys: int
    large_queue_keys: int
    steps: int


FULL = Size("resnet50", 224, (32, 64, 128, 256, 512), 65536, 1 << 20, 12)
TINY = Size("resnet10", 32, (8, 16), 512, 2048, 2)


class Machine(NamedTuple):
    device: torch.device
    size: Size
    precision: str  # the fast one that this device has

    def now(self) -> float:
        """When all that was asked for is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def peak_gigabytes(self) -> float | None:
        """Since the last call; None on a CPU."""
        if self.device.type != "cuda":
            return None
        peak = torch.cuda.max_memory_allocated(self.device) / 1e9
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        return round(peak, 2)


# --- is it right? -------------------------------------------------------------------------------------------------------


def losses(ranks: Ranks, changes: dict[str, Any], whole: bool) -> list[float]:
    """Of 20 steps of `synthetic`'s run, of its small network or of the recipe's ResNet-10."""
    torch.set_num_threads(1)
    recipe = synthetic.recipe(**changes)
    plan, log = synthetic.plan(recipe), synthetic.Log()
    learner = moved(recipe, ranks.device, whole)
    rows = (batch._replace(crops=batch.crops.to(ranks.device)) for batch in synthetic.batches(plan, ranks))
    train(learner, rows, plan, ranks, log.outputs())
    return log.losses()


def moved(recipe: Recipe, device: torch.device, whole: bool) -> Learner:
    """The same start on every device: it is drawn on the CPU."""
    if whole:
        return Learner.new(recipe, device)
    learner = synthetic.small_learner(recipe)
    learner.f_q.to(device), learner.f_k.to(device)
    learner.optimizer = build_optimizer(learner.f_q, recipe.optimizer)
    learner.queue.keys, learner.queue.steps = learner.queue.keys.to(device), learner.queue.steps.to(device)
    return learner


def same_losses_as_a_cpu(machine: Machine) -> dict[str, Any]:
    """In float64, with each optimizer, the symmetric form, both memory formats and passes of three groups."""
    cases = {
        "sgd": {}, "lars": {"optimizer": {"name": "lars", "decay_norm_and_bias": False}}, "adamw": {"optimizer": {"name": "adamw"}},
        "symmetric": {"contrast": {"symmetric": True}}, "channels_last, passes": {"run": {"memory_format": "channels_last", "groups_per_forward": 3}},
        "T 0.02": {"contrast": {"temperature": 0.02}},
    }  # fmt: skip
    return {name: near(losses(Ranks(device=machine.device), changes, name == "sgd"), losses(Ranks(), changes, name == "sgd"), 1e-8) for name, changes in cases.items()}


def near(found: Any, expected: Any, tolerance: float) -> float:
    """The largest difference. Raises AssertionError beyond the tolerance."""
    found, expected = (torch.as_tensor(one).detach().double().cpu() for one in (found, expected))
    difference = (found - expected).abs().max().item()
    assert difference <= tolerance, f"differs by {difference:.3g}, more than {tolerance:g}"
    return difference


def parts_as_on_a_cpu(machine: Machine) -> dict[str, Any]:
    """Loss, grouped BatchNorm and the colour stage in float32 on the device against the CPU, with their gradients."""
    draw, device = torch.Generator().manual_seed(0), machine.device
    q, k, queue = (F.normalize(torch.randn(n, 128, generator=draw)) for n in (32, 32, machine.size.queue_keys))
    found = {}
    for temperature in (0.2, 0.01):
        answers = []
        for at in (device, torch.device("cpu")):
            own = q.to(at).requires_grad_()
            contrast = info_nce(own, k.to(at), queue.to(at), temperature)
            answers.append([contrast.loss, torch.autograd.grad(contrast.loss.sum(), own)[0] * temperature])
        found[f"loss, T {temperature:g}"] = [near(a, b, 1e-4 / temperature) for a, b in zip(*answers, strict=True)]
    x = torch.randn(16, 8, 5, 5, generator=draw)
    for layout in (torch.contiguous_format, torch.channels_last):
        answers = []
        for at in (device, torch.device("cpu")):
            layer, own = GroupedBatchNorm2d(8, 4).to(at), x.to(at, memory_format=layout).requires_grad_()
            y = layer(own)
            answers.append([y, torch.autograd.grad(y.pow(3).sum(), own)[0], layer.sums])
        found[f"BatchNorm, {layout}"] = [near(a, b, 1e-3) for a, b in zip(*answers, strict=True)]
    crops = torch.randint(0, 256, (8, 64, 64, 3), generator=draw, dtype=torch.uint8)
    augment = recipe_of(1, "resnet10", 64, augment=AUGMENT).augment
    stages = [colour_stage(crops.to(at), np.arange(8), 0, 0, 0, augment, torch.float32) for at in (device, torch.device("cpu"))]
    found["colour stage"] = near(*stages, 0.02)  # of pixels whose spread is 1: 1 of 255
    return found


def a_bad_step_changes_nothing(machine: Machine) -> dict[str, Any]:
    """Each optimizer's flag on the device, which the host does not read."""
    for name in ("sgd", "lars", "adamw"):
        layer = torch.nn.Linear(5, 3).to(machine.device)
        optimizer = build_optimizer(layer, Optimizer(name=name))
        for bad in (False, True):
            before = layer.weight.detach().clone()
            for p in layer.parameters():
                p.grad = torch.full_like(p, float("nan") if bad else 1.0)
            optimizer.found_inf = torch.full((), float(bad), device=machine.device)
            optimizer.step()
            assert torch.equal(layer.weight, before) == bad, name
    return {"optimizers": 3}


def nccl_as_gloo(machine: Machine) -> dict[str, Any]:
    """Two ranks on two GPUs by NCCL against two on the CPU by gloo, float64."""
    if machine.device.type == "cuda" and torch.cuda.device_count() < 2:
        return {"skipped": "one GPU: NCCL between two ranks needs two"}
    expected = run_ranks(2, losses, {}, True)[0]
    alone = losses(Ranks(device=machine.device), {}, True)
    found = run_ranks(2, losses, {}, True, cuda=True)[0] if machine.device.type == "cuda" else expected
    return {"largest difference": near(found, expected, 1e-8), "to one rank": near(found, alone, 1e-8)}


# --- how fast? ----------------------------------------------------------------------------------------------------------


def rate(machine: Machine, rows: int, changes: dict[str, dict[str, Any]] | None = None, backbone: str | None = None) -> dict[str, Any]:
    """images/s of the whole loop on one device with `rows` rows in 8 groups, after three steps that do not count."""
    size, merged = machine.size, {"batch": {"global_batch_size": rows, "bn_group_size": max(2, rows // 8)}, "augment": AUGMENT}
    merged["contrast"] = {"queue_keys": size.queue_keys}
    merged["encoder"] = {"precision": machine.precision}
    for section, table in (changes or {}).items():
        merged[section] = {**merged.get(section, {}), **table}
    recipe = recipe_of(1, backbone or size.backbone, size.pixels, **merged)
    use_float32_of(recipe.encoder)
    plan, ranks, began = Plan(recipe, ROWS * 4), Ranks(device=machine.device), [0.0]

    def completed(step: int) -> bool:
        if step == 3:
            began[0] = machine.now()
        return False

    machine.peak_gigabytes()
    steps = itertools.islice(batches(plan, ranks), 3 + size.steps)
    with contextlib.suppress(StopIteration):
        train(Learner.new(recipe, machine.device), steps, plan, ranks, Outputs(lambda *_: None, lambda learner: None, None, completed))
    seconds = machine.now() - began[0]
    return {"images_per_second": round(size.steps * rows / seconds, 1), "peak_gigabytes": machine.peak_gigabytes()}


def images_per_second(machine: Machine) -> dict[str, Any]:
    return {f"{machine.size.backbone}, {machine.size.pixels} px, {machine.precision}, N {rows}": rate(machine, rows) for rows in machine.size.rows}


def choices(machine: Machine) -> dict[str, Any]:
    """The same batch in other precisions, layouts, BatchNorm groups, and with compiled encoders."""
    rows = machine.size.rows[min(2, len(machine.size.rows) - 1)]
    cases: dict[str, dict] = {
        "as by default": {}, "float32": {"encoder": {"precision": "float32"}}, "tf32": {"encoder": {"precision": "tf32"}},
        "contiguous": {"run": {"memory_format": "contiguous"}}, "one group": {"batch": {"bn_group_size": rows, "allow_batchnorm_leak": True}},
        "lars": {"optimizer": {"name": "lars", "decay_norm_and_bias": False}},
    }  # fmt: skip
    if machine.device.type == "cuda":
        cases["compiled"] = {"encoder": {"compile": True}}
        cases["compiled, one group"] = {"encoder": {"compile": True}, "batch": {"bn_group_size": rows, "allow_batchnorm_leak": True}}
    return {f"{name}, N {rows}": rate(machine, rows, changes) for name, changes in cases.items()}


def large_queue(machine: Machine) -> dict[str, Any]:
    rows, keys = machine.size.rows[-2], machine.size.large_queue_keys
    return {f"K {k}, N {rows}": rate(machine, rows, {"contrast": {"queue_keys": k}}) for k in (machine.size.queue_keys, keys)}


def shares(machine: Machine) -> dict[str, Any]:
    """Of each part of the step, by events on the device."""
    rows = machine.size.rows[-2]
    recipe = recipe_of(
        1, machine.size.backbone, machine.size.pixels, augment=AUGMENT, encoder={"precision": machine.precision},
        batch={"global_batch_size": rows, "bn_group_size": max(2, rows // 8)}, contrast={"queue_keys": machine.size.queue_keys},
    )  # fmt: skip
    return {f"N {rows}": shares_of(recipe, machine.size.steps, Ranks(device=machine.device), Parts(machine.device))}


def colour_stage_rate(machine: Machine) -> dict[str, Any]:
    """Views a second of MoCo v2's colour stage."""
    size, rows = machine.size, machine.size.rows[-2]
    augment = recipe_of(1, "resnet10", size.pixels, augment=AUGMENT).augment
    crops = torch.randint(0, 256, (rows, size.pixels, size.pixels, 3), dtype=torch.uint8).to(machine.device)
    for warm in (True, False):
        began = machine.now()
        for step in range(1 if warm else 10):
            colour_stage(crops, np.arange(rows) + step * rows, 0, 0, 0, augment, torch.float32)
        seconds = machine.now() - began
    return {"views_per_second": round(10 * rows / seconds)}


CHECKS: list[Callable[[Machine], dict[str, Any]]] = [
    same_losses_as_a_cpu, parts_as_on_a_cpu, a_bad_step_changes_nothing, nccl_as_gloo,
    images_per_second, shares, colour_stage_rate, large_queue, choices,
]  # fmt: skip


def run(machine: Machine, say: Callable[[str], None] = print) -> tuple[dict[str, Any], int]:
    """What each check found, and how many failed. A failure stops no other."""
    name = torch.cuda.get_device_name(machine.device) if machine.device.type == "cuda" else "cpu"
    found: dict[str, Any] = {"device": name, "torch": torch.__version__, "precision": machine.precision}
    failed = 0
    for check in CHECKS:
        began = time.perf_counter()
        try:
            found[check.__name__] = check(machine)
        except Exception as error:  # noqa: BLE001 - told, counted, and the next one is tried
            traceback.print_exc()
            found[check.__name__] = {"failed": f"{type(error).__name__}: {error}"}
            failed += 1
        say(f"{check.__name__} ({time.perf_counter() - began:.0f} s): {json.dumps(found[check.__name__])}")
    return found, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on a CPU")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not arguments.cpu and not torch.cuda.is_available():
        print("no GPU here; --cpu runs the script with tiny sizes")
        return 2
    machine = Machine(torch.device("cpu"), TINY, "float32") if arguments.cpu else Machine(torch.device("cuda", 0), FULL, "bfloat16")
    found, failed = run(machine)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
