"""Parts of a step beside what they replace, each in one process with one thread: momentum, enqueue, loss, grouped BatchNorm, encoders.

Milliseconds are CPU time of the measuring thread, which neighbours of the machine do not move much; cases take turns in one
process, and ratios are medians over rounds of one round's ratio. Extra memory is the peak of the resident set above what it was
before, in a process for each case alone. Not here: whole steps (step_whole.py), what goes over the wire (step_wire.py).
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moco_ray import recipe
from moco_ray.method.batchnorm import GroupedBatchNorm2d
from moco_ray.method.contrast import info_nce
from moco_ray.method.encoder import build_backbone, build_encoder
from moco_ray.method.momentum import follow, key_encoder_of
from moco_ray.method.queue import Queue
from tests import released_step

T, C = 0.2, 128
HEALTHY = torch.ones((), dtype=torch.bool)


def thread_milliseconds(work: Callable[[], Any]) -> float:
    began = time.thread_time()
    work()
    return (time.thread_time() - began) * 1e3


def taking_turns(cases: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each case in each round, after one round that does not count."""
    for work in cases.values():
        work()
    found: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, work in cases.items():
            found[name].append(thread_milliseconds(work))
    return found


def compared(found: dict[str, list[float]], references: list[str], ours: str) -> dict[str, Any]:
    """Medians, and how many times as fast `ours` is as each reference."""
    held = {"ms": {name: round(statistics.median(values), 3) for name, values in found.items()}}
    pairs = {name: [a / b for a, b in zip(found[name], found[ours], strict=True)] for name in references}
    return {**held, "times": {name: round(statistics.median(ratios), 2) for name, ratios in pairs.items()}}


def momentum(rounds: int) -> dict[str, Any]:
    """m = 0.999; ours with the flag that holds an update back."""
    found = {}
    for backbone in ("resnet18", "resnet50"):
        f_q = build_encoder(recipe.Encoder(backbone=backbone), 4, 0)
        f_k, theirs = key_encoder_of(f_q), key_encoder_of(f_q)
        cases = {
            "released": lambda: released_step.momentum(theirs.parameters(), f_q.parameters(), 0.999),  # noqa: B023 - called in this turn
            "ours": lambda: follow(f_k, f_q, 0.999, HEALTHY),  # noqa: B023
        }
        found[f"{backbone} with MLP head"] = compared(taking_turns(cases, 3 * rounds), ["released"], "ours")
    return found


def enqueue(rounds: int) -> dict[str, Any]:
    """256 keys into 65536; the released code also clones its queue at each step."""
    queue, keys = Queue(65536, C, 0), F.normalize(torch.randn(256, C))
    theirs, pointer = queue.keys.T.contiguous(), torch.zeros(1, dtype=torch.long)
    cases = {
        "released": lambda: released_step.enqueue(theirs, pointer, keys),
        "released, with its clone": lambda: (released_step.enqueue(theirs, pointer, keys), theirs.clone()),
        "ours": lambda: queue.enqueue(keys, 1, HEALTHY),
    }
    return compared(taking_turns(cases, 10 * rounds), ["released", "released, with its clone"], "ours")


# --- loss ---------------------------------------------------------------------------------------------------------------


def loss_cases(rows: int, keys: int, names: tuple[str, ...]) -> dict[str, Callable[[], Tensor]]:
    """Loss and gradient to q."""
    draw = torch.Generator().manual_seed(0)
    q = F.normalize(torch.randn(rows, C, generator=draw)).requires_grad_()
    k = F.normalize(torch.randn(rows, C, generator=draw))
    queue = torch.randn(keys, C, generator=draw)
    F.normalize(queue, out=queue)
    turned = queue.T.contiguous() if names != ("ours",) else None

    def released(accuracy: bool) -> Tensor:
        logits = released_step.logits_of(q, k, turned, T)
        if accuracy:
            released_step.right_of(logits)
        return torch.autograd.grad(released_step.loss_of(logits), q)[0]

    every = {
        "released": lambda: released(False),
        "released, with its accuracies": lambda: released(True),
        "ours": lambda: torch.autograd.grad(info_nce(q, k, queue, T).loss.mean(), q)[0],
    }
    return {name: every[name] for name in names}


def loss(rounds: int) -> dict[str, Any]:
    """Ours gives top-1, top-5 and the mean similarities too; the released code computes its two accuracies beside its loss."""
    released = ("released", "released, with its accuracies")
    found: dict[str, Any] = {}
    for rows, keys in ((32, 65536), (256, 65536), (32, 1 << 20)):
        cases = loss_cases(rows, keys, (*released, "ours"))
        entry = compared(taking_turns(cases, rounds if keys > 65536 else 8 * rounds), list(released), "ours")
        del cases
        if rows == 32:
            entry["extra_megabytes"] = {name: alone(extra_megabytes, rows, keys, name) for name in ("released", "ours")}
            entry["extra_memory_share"] = entry["extra_megabytes"]["ours"] / entry["extra_megabytes"]["released"]
        found[f"N {rows}, K {keys}"] = entry
    return found


def four_million(rounds: int) -> dict[str, Any]:
    """Ours alone: the released code would take 3.6 GB more than the queue's 2.1."""
    return alone(_four_million, rounds)


def _four_million(rounds: int) -> dict[str, Any]:
    keys = 1 << 22
    cases = loss_cases(32, keys, ("ours",))
    extra = _peak_above(cases["ours"])
    return {"keys": keys, "ms": {"ours": statistics.median(taking_turns(cases, rounds)["ours"])}, "extra_megabytes": {"ours": extra}}


def extra_megabytes(rows: int, keys: int, name: str) -> float:
    return _peak_above(loss_cases(rows, keys, (name,))[name])


def _peak_above(work: Callable[[], Any]) -> float:
    """The most that the resident set grew by in one call, in MB."""
    small = torch.randn(32, 64, requires_grad=True)
    (small @ torch.randn(64, 4096)).sum().backward()  # the libraries' own buffers
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    work()
    return (_status("VmHWM") - before) / 1024


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def alone(function: Callable, *arguments: Any) -> Any:
    """`function` in a fresh process with one thread."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_alone, args=(send, function, arguments))
    process.start()
    send.close()
    answer = receive.recv()
    process.join()
    return answer


def _alone(send: Any, function: Callable, arguments: tuple) -> None:
    torch.set_num_threads(1)
    send.send(function(*arguments))


# --- grouped BatchNorm --------------------------------------------------------------------------------------------------

SHAPES = {  # C,H,W: how many such layers a ResNet-50 at 224 pixels has
    (64, 112, 112): 1, (64, 56, 56): 6, (256, 56, 56): 4, (128, 56, 56): 1, (128, 28, 28): 7, (512, 28, 28): 5, (256, 28, 28): 1,
    (256, 14, 14): 11, (1024, 14, 14): 7, (512, 14, 14): 1, (512, 7, 7): 5, (2048, 7, 7): 4,
}  # fmt: skip


def batchnorm(rounds: int) -> dict[str, Any]:
    """32 rows in 4 groups against `nn.BatchNorm2d`; forward twice (query and key) and backward once, summed over the 53 layers of a ResNet-50."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for layout in (torch.contiguous_format, torch.channels_last):
            totals = {"BatchNorm2d": [0.0] * rounds, "ours": [0.0] * rounds}
            worst = 9.0
            for shape, count in SHAPES.items():
                turns = taking_turns(_norm_cases(shape, dtype, layout), rounds)
                worst = min(worst, compared(turns, ["BatchNorm2d"], "ours")["times"]["BatchNorm2d"])
                for name, values in turns.items():
                    totals[name] = [total + count * value for total, value in zip(totals[name], values, strict=True)]
            name = f"{str(dtype)[6:]}, {'channels_last' if layout is torch.channels_last else 'contiguous'}"
            found[name] = {**compared(totals, ["BatchNorm2d"], "ours"), "worst_layer": worst}
    return found


def _norm_cases(shape: tuple[int, int, int], dtype: torch.dtype, layout: torch.memory_format) -> dict[str, Callable[[], Any]]:
    x = torch.randn(32, *shape, dtype=dtype).contiguous(memory_format=layout).requires_grad_()
    gradient = torch.randn_like(x)

    def of(layer: nn.Module) -> Callable[[], Any]:
        def work() -> None:
            with torch.no_grad():
                layer(x)
            torch.autograd.grad(layer(x), (x, *layer.parameters()), gradient)

        return work

    return {"BatchNorm2d": of(nn.BatchNorm2d(shape[0])), "ours": of(GroupedBatchNorm2d(shape[0], 8))}


# --- precision and layout -----------------------------------------------------------------------------------------------


def layouts(rounds: int) -> dict[str, Any]:
    """Query encoder forward and backward, key encoder forward, 4 BatchNorm groups: how many times as fast as torchvision's contiguous float32."""
    found = {}
    for backbone, pixels, rows in (("resnet18", 64, 32), ("resnet50", 224, 8)):
        cases = {"torchvision, float32, contiguous": _pass(build_backbone(backbone, "imagenet"), rows, pixels, torch.contiguous_format, False)}
        for precision in ("float32", "bfloat16"):
            for name, layout in (("contiguous", torch.contiguous_format), ("channels_last", torch.channels_last)):
                encoder = build_encoder(recipe.Encoder(backbone=backbone), rows // 4, 0).backbone
                cases[f"{precision}, {name}"] = _pass(encoder, rows, pixels, layout, precision == "bfloat16")
        turns = taking_turns(cases, rounds)
        reference = turns["torchvision, float32, contiguous"]
        ratios = {name: statistics.median(a / b for a, b in zip(reference, values, strict=True)) for name, values in turns.items()}
        found[f"{backbone}, {pixels} pixels"] = {
            "ms": {name: round(statistics.median(values), 1) for name, values in turns.items()}, "times": {name: round(r, 2) for name, r in ratios.items()}
        }  # fmt: skip
    return found


def _pass(encoder: nn.Module, rows: int, pixels: int, layout: torch.memory_format, reduced: bool) -> Callable[[], Any]:
    encoder, x = encoder.to(memory_format=layout), torch.randn(rows, 3, pixels, pixels).contiguous(memory_format=layout)

    def work() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=reduced):
            with torch.no_grad():
                encoder(x)
            y = encoder(x)
        torch.autograd.grad(y.float().square().sum(), list(encoder.parameters()))

    return work
