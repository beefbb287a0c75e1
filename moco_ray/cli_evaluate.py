"""The words of `moco-ray evaluate`. Not here: what the protocols do (evaluate_run.py, probe_run.py)."""

import argparse
from collections.abc import Callable

from moco_ray.errors import UserError

ABOUT = "judge a backbone: kNN, few labels and a linear classifier beside raw pixels, or by training on labels"
PROTOCOLS = (
    "table: kNN, few labels and logistic regression on cached features, beside raw pixels, colours and an untrained backbone (the default); "
    "linear: the published MoCo protocol on Ray Train; sweep: the same classifier on cached features at several learning rates; finetune: the "
    "whole network with --labels per cent of the labels"
)
ONLY = {  # options that some protocols alone read
    "workers": ("linear", "finetune"),
    "epochs": ("linear", "sweep", "finetune"),
    "learning_rate": ("linear", "sweep", "finetune"),
    "batch_size": ("linear", "sweep", "finetune"),
    "image_pixels": ("linear", "sweep", "finetune"),
    "labels": ("finetune",),
    "seed": ("linear", "sweep", "finetune"),
    "no_linear": ("table",),
}


def evaluate_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command."""
    evaluate = command("evaluate", _evaluate, ABOUT)
    place = "a run folder (its newest checkpoint), RUN/checkpoints/step-N.aM.pt, or a .safetensors of ours"
    evaluate.add_argument("place", metavar="RUN|CHECKPOINT|FILE", help=place)
    evaluate.add_argument("--protocol", choices=("table", "linear", "sweep", "finetune"), default="table", help=PROTOCOLS)
    evaluate.add_argument("--bank", metavar="URI", help="labelled images to learn from or look neighbours up in (the recipe's evaluation.bank_uri)")
    evaluate.add_argument(
        "--queries", metavar="URI", help="labelled images to classify (the recipe's evaluation.query_uri); for table the bank again: leave one out"
    )
    evaluate.add_argument("--output", metavar="FOLDER", help="for the result's .json, .md and .png (the run folder; none for a file)")
    evaluate.add_argument("--no-linear", action="store_true", default=None, help="table: without the linear classifier, which takes the longest")
    evaluate.add_argument("--workers", type=int, metavar="N", help="linear, finetune: Ray Train workers, at most one for each 32 rows of a batch (1)")
    evaluate.add_argument("--epochs", type=int, metavar="N", help="(100; finetune 20)")
    evaluate.add_argument("--learning-rate", type=float, metavar="RATE", help="of the classifier, 30; finetune: of the backbone, 0.002, the classifier's is 250 times that; sweep: this one alone")
    evaluate.add_argument("--batch-size", type=int, metavar="ROWS", help="of all workers together (256)")
    evaluate.add_argument("--image-pixels", type=int, metavar="PIXELS", help="side of the crops; the test image's shorter side is 8/7 of it (those of the backbone)")
    evaluate.add_argument("--labels", type=int, metavar="PERCENT", help="finetune: 1, 10 or 100 per cent of the labels of each class (100)")
    evaluate.add_argument("--seed", type=int, metavar="N", help="of the classifier's start, the order, the crops and the labels' choice (0)")


def _evaluate(arguments: argparse.Namespace) -> None:
    kind = arguments.protocol
    for name, protocols in ONLY.items():
        if getattr(arguments, name) is not None and kind not in protocols:
            raise UserError(f"--{name.replace('_', '-')} goes with --protocol {' or '.join(protocols)}, not with {kind}; leave it out")
    if kind == "table":
        from moco_ray.evaluate_run import evaluate_run

        print(evaluate_run(arguments.place, arguments.bank, arguments.queries, arguments.output, not arguments.no_linear, arguments.debug))
        return
    print(_probe(arguments))


def _probe(arguments: argparse.Namespace) -> str:
    from moco_ray.evaluate.protocols import Choices
    from moco_ray.probe_run import Request, probe_run

    if arguments.seed is not None and not 0 <= arguments.seed < 2**32:
        raise UserError(f"--seed {arguments.seed} must be 0 or more, and below 2**32")
    choices = Choices(arguments.epochs, arguments.learning_rate, arguments.batch_size, arguments.image_pixels, arguments.seed or 0)
    workers = 1 if arguments.workers is None else arguments.workers
    percent = 100 if arguments.labels is None else arguments.labels
    return probe_run(
        Request(arguments.protocol, arguments.place, arguments.bank, arguments.queries, arguments.output, choices, workers, percent, arguments.debug)
    )
