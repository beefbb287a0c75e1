"""What evaluations beside the training cost it: the same run on two workers, with and without, one after the other, some rounds.

    python -m tests.bench.evaluation            # writes tests/bench/results/evaluation.json

The demo's network and batch on 8,192 drawn images of 32 pixels; kNN of 4,096 images against 1,024 after each of three epochs, each
with a checkpoint, and once more at the end. images/s by the clock, from step 8 to the last step; what comes after that is not in it.
Reference: the run without evaluations.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

from moco_ray.data.prototypes import drawn_prototypes
from moco_ray.monitor import read_metrics
from tests.shell import Shell

ROWS, BATCH, EPOCHS, FIRST = 8192, 256, 4, 8
RECIPE = Path(__file__).parent.parent.parent / "jobs" / "demo.toml"
SETTINGS = [
    f"schedule.steps={EPOCHS * ROWS // BATCH}", "schedule.warmup_steps=8", "run.log_every_steps=8", "run.checkpoint_every_steps=1000",
    "run.checkpoint_every_minutes=0",
]  # fmt: skip
WITH = ["evaluation.bank_uri=drawn/train", "evaluation.query_uri=drawn/test", "evaluation.bank_rows=4096", "evaluation.query_rows=1024", "evaluation.neighbours=20", "evaluation.every_epochs=1"]
WITHOUT = ["evaluation.bank_uri=", "evaluation.query_uri=", "evaluation.every_epochs=0"]


def images_per_second(shell: Shell, name: str, words: list[str]) -> tuple[float, list[dict]]:
    """Of one run, and its evaluations."""
    code, _, error = shell.run(
        "pretrain", str(RECIPE), "--workers", "2", "--data", "drawn/train", "--name", name, *SETTINGS, *words
    )
    if code:
        raise SystemExit(error)
    entries = read_metrics(shell.folder / "runs" / name / "metrics.jsonl")
    times = {entry["step"]: entry["wall_time"] for entry in entries if "loss" in entry}
    seconds = times[max(times)] - times[FIRST]
    landed = [{**e, "before_the_last_step": e["wall_time"] < times[max(times)]} for e in entries if "knn_top1" in e]
    return (max(times) - FIRST) * BATCH / seconds, landed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "evaluation.json")
    arguments = parser.parse_args()
    rates: dict[str, list[float]] = {"without": [], "with": []}
    landed = []
    with tempfile.TemporaryDirectory() as folder:
        drawn_prototypes(Path(folder) / "drawn", rows=ROWS, test_rows=1024)
        shell = Shell(Path(folder), {})
        for number in range(arguments.rounds):
            for kind, words in (("without", WITHOUT), ("with", WITH)):
                rate, evaluations = images_per_second(shell, f"{kind}-{number}", words)
                rates[kind].append(rate)
                landed += evaluations
                print(f"round {number + 1}, {kind}: {rate:.0f} images/s", flush=True)
        shell.close()
    found = {
        "cores": os.cpu_count(),
        "workers": 2,
        "images_per_second": rates,
        "ratio": statistics.median(rates["with"]) / statistics.median(rates["without"]),
        "ratio_of_each_round": [a / b for a, b in zip(rates["with"], rates["without"], strict=True)],
        "evaluations_before_the_last_step": sum(e["before_the_last_step"] for e in landed),
        "evaluations": len(landed),
        "seconds_an_evaluation": statistics.median(e["evaluation_seconds"] for e in landed),
    }
    arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
