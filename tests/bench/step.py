"""What a step costs beside what a user would otherwise run: parts, bytes on the wire, whole steps, shares.

    python -m tests.bench.step [PART ...] [--rounds 5]          # all parts: 15 minutes; each one: up to 4

Parts: momentum, enqueue, loss, four_million, batchnorm (step_parts.py); wire (step_wire.py, needs root); whole, share (step_whole.py).
The reference is a step of the released MoCo written down anew (tests/released_step.py), which computes the same in float64
(tests/test_fused_parts.py). Results are kept in tests/bench/results/step.json, part by part, with the machine they were measured on; the table
in step.md is made of them, with each target and whether it was met.
"""

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.bench import step_parts, step_whole, step_wire

RESULTS = Path(__file__).with_name("results")
PARTS = {
    "momentum": step_parts.momentum, "enqueue": step_parts.enqueue, "loss": step_parts.loss, "four_million": step_parts.four_million,
    "batchnorm": step_parts.batchnorm, "wire": step_wire.wire, "whole": step_whole.whole, "share": step_whole.share,
}  # fmt: skip


class Target(NamedTuple):
    """A number of the results, found by its path, and its bound."""

    path: tuple[str, ...]
    bound: float
    at_most: bool = False

    def value(self, results: dict[str, Any]) -> float | None:
        found: Any = results
        for name in self.path:
            found = found.get(name) if isinstance(found, dict) else None
        return found

    def met(self, value: float) -> bool:
        return value <= self.bound if self.at_most else value >= self.bound


TARGETS = [
    *(Target(("momentum", f"{name} with MLP head", "times", "released"), 3.5) for name in ("resnet18", "resnet50")),
    Target(("enqueue", "times", "released, with its clone"), 1.0),
    Target(("loss", "N 32, K 65536", "times", "released"), 3.0),
    Target(("loss", "N 32, K 65536", "times", "released, with its accuracies"), 3.0),
    Target(("loss", "N 256, K 65536", "times", "released"), 3.0),
    Target(("loss", "N 32, K 1048576", "times", "released"), 3.0),
    Target(("loss", "N 32, K 1048576", "extra_memory_share"), 0.01, at_most=True),
    *(Target(("batchnorm", f"{dtype}, {layout}", "times", "BatchNorm2d"), 0.8) for dtype in ("float32", "bfloat16") for layout in ("contiguous", "channels_last")),
    Target(("wire", "8 ranks", "times_fewer", "released"), 25.0),
    Target(("wire", "8 ranks", "times_fewer", "released, its queue kept at home"), 25.0),
    Target(("wire", "8 ranks", "megabytes_of_queue", "ours"), 0.1, at_most=True),
    *(
        Target(("whole", world, "times", f"ours, {precision}"), bound)
        for world in ("1 rank", "2 ranks", "4 ranks")
        for precision, bound in (("float32", 1.2), ("bfloat16", 1.8))
    ),
    Target(("share", "float32", "neither_encoder_nor_optimizer"), 0.05, at_most=True),
]


def machine() -> dict[str, Any]:
    models = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    loads = os.getloadavg()
    return {"cpu": models[0] if models else platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__, "load_before": round(loads[0], 1)}


def table(results: dict[str, Any]) -> str:
    """Markdown: what was measured, against its target."""
    lines = ["| measured | value | target | |", "|---|---|---|---|"]
    for target in TARGETS:
        value = target.value(results)
        if value is None:
            lines.append(f"| {', '.join(target.path)} | not measured | | |")
            continue
        bound = f"{'at most' if target.at_most else 'at least'} {target.bound:g}"
        lines.append(f"| {', '.join(target.path)} | {value:.4g} | {bound} | {'met' if target.met(value) else '**missed**'} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=RESULTS / "step.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.parts or PARTS:
        conditions = {**machine(), "rounds": arguments.rounds}
        found = PARTS[name](arguments.rounds)
        results = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
        results[name] = {**found, "measured_on": conditions}
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
        arguments.json.with_suffix(".md").write_text(table(results))
        print(name, json.dumps(found, indent=1), flush=True)
    print(table(json.loads(arguments.json.read_text())))


if __name__ == "__main__":
    main()
