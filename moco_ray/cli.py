"""The command line. Not here: what the commands do.

A user's mistake is one line on standard error and exit code 2; interrupted is 130, stopped by SIGTERM 143; anything else keeps its traceback.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from moco_ray.cli_backbone import backbone_commands
from moco_ray.cli_evaluate import evaluate_command
from moco_ray.cli_health import health_commands
from moco_ray.cli_runs import runs_command, watch_command
from moco_ray.cli_submit import submit_command
from moco_ray.errors import Stopped, UserError
from moco_ray.ray_job import folder_removed
from moco_ray.words import note

CPU_QUIET = {  # set before torch and Ray are imported: what they print is not for the user of this command
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_TRAIN_V2_ENABLED": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning",
}
OWN_WORDS = {"RAY_DEDUP_LOGS_SKIP_REGEX": ".*"}  # what Ray prints of lost processes and nodes; events.py says it in a line


WORKERS = "Ray Train workers, at most one for each BatchNorm group; 2:16 for as many as the cluster has room for"
PROFILE = "trace so many steps of worker 0 into tensorboard/profile/ of the run, and tell where their time goes (for example 20)"

GOES_ON = {  # after Ctrl-C
    **dict.fromkeys(("pretrain", "resume"), "; `moco-ray resume RUN` goes on from the newest checkpoint"),
    "pack": "; the same command goes on",
    "evaluate": "; the same command goes on, where a protocol trains",
}


def main(words: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = _parsed(words)
    for name, value in (CPU_QUIET if arguments.debug else CPU_QUIET | OWN_WORDS).items():
        os.environ.setdefault(name, value)
    try:
        if removed := folder_removed():
            raise UserError(removed)
        return arguments.run(arguments) or 0  # a command that judges returns the code of its judgement
    except Stopped as stopped:
        print(f"moco-ray: {stopped}", file=sys.stderr)
        return 143
    except UserError as error:
        if arguments.debug:
            raise
        print(f"moco-ray: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"moco-ray: interrupted{arguments.goes_on}", file=sys.stderr)
        return 130


def _parsed(words: list[str] | None) -> argparse.Namespace:
    """The arguments of one command. Leaves with code 2 for words that it does not have."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(words)
    # argparse takes no positional words after an option: the overrides among them come back as `rest`.
    wrong = [word for word in rest if word.startswith("-") or not hasattr(arguments, "overrides")]
    if wrong:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    if rest:
        arguments.overrides += rest
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moco-ray",
        description="Pre-train a vision backbone with Momentum Contrast on Ray, on your own unlabelled images.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run, about: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=about, description=about)
        sub.add_argument("--debug", action="store_true", help="show tracebacks and Ray's own log")
        sub.set_defaults(run=run, goes_on=GOES_ON.get(name, ""))
        return sub

    pretrain = command("pretrain", _pretrain, "start a run")
    _recipe_arguments(pretrain)
    pretrain.add_argument("--workers", default="1", metavar="N|MIN:MAX", help=WORKERS + " (1)")
    pretrain.add_argument(
        "--storage", help="folder or URI that holds the run folders; on a cluster a shared one (runs)"
    )
    begin = pretrain.add_mutually_exclusive_group()
    begin.add_argument("--continue", dest="go_on_from", metavar="FILE", help="carry a run of the released MoCo on: its whole .pth.tar, with queue and optimizer")
    begin.add_argument(
        "--warm-start", metavar="RUN|CHECKPOINT|FILE", help="begin from this backbone (what `import` or `export --to safetensors` wrote, or a run's)"
    )
    pretrain.add_argument("--name", help="name of the run folder (the recipe's file name)")
    pretrain.add_argument("--profile", type=int, metavar="STEPS", help=PROFILE)

    resume = command("resume", _resume, "go on from a run's newest checkpoint, with any number of workers")
    resume.add_argument("folder", metavar="RUN", help="run folder: storage/name")
    resume.add_argument("--workers", metavar="N|MIN:MAX", help=WORKERS + " (as before)")
    resume.add_argument("--data", metavar="URI", help="the same images at another place: data.uri")
    resume.add_argument("--profile", type=int, metavar="STEPS", help=PROFILE)
    resume.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="run.* (but the seed), evaluation.*, data.uri and data.max_bad_rows_fraction may change",
    )

    plan = command("show-plan", _show_plan, "print what a recipe means: steps, groups, rates, memory, warnings")
    _recipe_arguments(plan)
    plan.add_argument("--rows", type=int, help="number of images, where no data set is given")
    plan.add_argument("--workers", metavar="N|MIN:MAX", help="for the efficiency and memory of this many workers, of a range for both its ends (1)")
    plan.add_argument("--at-step", type=int, metavar="STEP", help="also tell what a resume at this step would open")
    plan.add_argument("--gpus", metavar="MIN:MAX", help="instead: predicted speed, load, hours and money on so many GPUs, for example 8:1024")
    plan.add_argument("--cluster", metavar="FILE", help="with --gpus: TOML of your cluster's facts, for example infra/cluster_facts.toml")
    plan.add_argument("--fact", action="append", default=[], metavar="KEY=VALUE", help="with --gpus: one of them, for example gpu.images_per_second=1500")

    _data_commands(command)

    evaluate_command(command)
    alike = command("neighbours", _neighbours, "show which images a backbone takes for alike: a sheet, and TensorBoard's projector")
    alike.add_argument("place", metavar="RUN|CHECKPOINT|FILE", help="as for evaluate")
    alike.add_argument("--data", metavar="URI", help="images, labelled or not (the run's own)")
    alike.add_argument("--rows", type=int, default=10_000, help="drawn from them, among which neighbours are looked for (10000)")
    alike.add_argument("--queries", type=int, default=8, help="images whose neighbours are shown (8)")
    alike.add_argument("--nearest", type=int, default=8, help="neighbours of each (8)")
    alike.add_argument("--seed", type=int, default=0, help="of the draws (0)")
    alike.add_argument("--map", action="store_true", help="also map.png: up to 2000 images at their two principal components")
    alike.add_argument("--output", metavar="FOLDER", help="for neighbours.png, map.png and tensorboard/ (the run folder)")
    backbone_commands(command)
    health_commands(command)
    runs_command(command)
    watch_command(command)
    submit_command(command, _parsed)
    return parser


def _data_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Those about images alone."""
    pack = command("pack", _pack, "any data set to shuffled, checked Parquet shards; continues where it was interrupted")
    pack.add_argument("source", metavar="SOURCE", help="images, as for pretrain")
    pack.add_argument("target", metavar="TARGET", help="an empty or new folder or prefix")
    pack.add_argument("--seed", type=int, default=0, help="of the order (0)")
    pack.add_argument("--image-column", default="image", help="of a Parquet source (image)")
    pack.add_argument("--label-column", help="of a Parquet source, or a field of a tar's .json; '' for no labels (found)")
    pack.add_argument("--drop-duplicates", action="store_true", help="keep the first of images that are equal byte for byte")
    pack.add_argument("--short-side", type=int, metavar="PIXELS", help="make larger images this small: lossy, other data")
    pack.add_argument("--quality", type=int, default=90, help="of the JPEG that --short-side makes (90)")
    pack.add_argument("--max-image-pixels", type=int, default=100_000_000, help="larger images count as bad (100000000)")

    bench = command("bench-input", _bench_input, "measure how fast this machine makes crops of a data set, stage by stage")
    bench.add_argument("data", metavar="URI", help="images, as for pretrain")
    bench.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for example augment.image_pixels=96")
    bench.add_argument("--recipe", help="TOML file whose crops and batch to use (MoCo v2: 224 pixels, batch 256)")
    bench.add_argument("--seconds", type=float, default=20, help="how long to measure the whole plane (20)")
    bench.add_argument("--target", type=float, default=1000, metavar="RATE", help="images/s that a trainer would take (1000)")
    bench.add_argument("--json", metavar="FILE", help="write all figures into a file")

    demo = command("demo-data", _demo_data, "fetch Fashion-MNIST, or draw the generated set, as Parquet shards")
    demo.add_argument("target", help="folder to write train/, validation/ and test/ into")
    demo.add_argument("--source", help="folder with Fashion-MNIST's four idx files, instead of looking for them")
    demo.add_argument("--drawn", action="store_true", help="draw the small generated set instead")


def _recipe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="TOML file, for example jobs/moco_v2_imagenet.toml")
    parser.add_argument("--data", metavar="URI", help="short for data.uri=URI")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for example optimizer.learning_rate=0.06")


def _read_recipe(arguments: argparse.Namespace):
    from moco_ray.recipe import Recipe

    return Recipe.read(arguments.recipe, _overrides(arguments))


def _overrides(arguments: argparse.Namespace) -> list[str]:
    return arguments.overrides + ([f"data.uri={arguments.data}"] if arguments.data else [])


def _pretrain(arguments: argparse.Namespace) -> None:
    from moco_ray.run_folder import RunFolder

    recipe, profile_steps = _read_recipe(arguments), _profile_steps(arguments)
    folder = RunFolder.at(arguments.storage or "runs", arguments.name or Path(arguments.recipe).stem)
    from moco_ray import launch  # takes seconds to import, so mistakes in the recipe are told before
    from moco_ray.plan import Workers

    workers = Workers.of(arguments.workers)
    _say(f"run folder: {folder.place}", f"watch it:   tensorboard --logdir {folder.store.place('tensorboard')}")
    begin = launch.Begin(released=arguments.go_on_from or "")
    if arguments.warm_start:
        from moco_ray.backbone import read_backbone

        begin = launch.Begin(read_backbone(arguments.warm_start))
    launch.pretrain(recipe, folder, workers, begin, arguments.debug, profile_steps)
    _finished(folder)


def _resume(arguments: argparse.Namespace) -> None:
    from moco_ray.checkpoint import newest
    from moco_ray.run_folder import RunFolder

    profile_steps = _profile_steps(arguments)
    folder = RunFolder.existing(arguments.folder)
    last = newest(folder.store)
    where = f"step {last.step}" if last else "step 0: no checkpoint was written before the run stopped"
    _say(f"resuming {folder.place} from {where}", f"watch it:   tensorboard --logdir {folder.store.place('tensorboard')}")
    from moco_ray import launch
    from moco_ray.plan import Workers

    workers = Workers.of(arguments.workers) if arguments.workers else None
    launch.resume(folder, workers, _overrides(arguments), arguments.debug, profile_steps)
    _finished(folder)


def _profile_steps(arguments: argparse.Namespace) -> int:
    if arguments.profile is not None and arguments.profile < 1:
        raise UserError(f"--profile {arguments.profile}: give the number of steps to trace, for example --profile 20")
    return arguments.profile or 0


def _finished(folder) -> None:
    _say(f"finished. checkpoints: {folder.store.place('checkpoints')}", f"curves:     {folder.store.place('curves.png')}")


def _show_plan(arguments: argparse.Namespace) -> None:
    recipe, facts = _read_recipe(arguments), arguments.cluster or arguments.fact
    with _spread(arguments) as spread:
        if arguments.gpus is None:
            from moco_ray.plan import Workers
            from moco_ray.show_plan import describe

            if facts:
                raise UserError("--cluster and --fact go with --gpus: give the range of GPUs, as --gpus 8:1024")
            print(describe(recipe, arguments.rows, Workers.of(arguments.workers or "1"), arguments.at_step, spread))
            return
        from moco_ray.cluster_facts import ClusterFacts
        from moco_ray.show_scale import describe_scale

        if arguments.workers is not None or arguments.at_step is not None:
            raise UserError("--gpus predicts other numbers of workers: give it without --workers and --at-step")
        print(describe_scale(recipe, arguments.rows, arguments.gpus, ClusterFacts.read(arguments.cluster, arguments.fact), spread))


@contextlib.contextmanager
def _spread(arguments: argparse.Namespace):
    """A map over Ray tasks for data sets that are large; Ray is not even imported for the others."""
    with contextlib.ExitStack() as stack:

        def spread(work, items):
            from moco_ray.session import lazily_spread

            yield from stack.enter_context(lazily_spread(1, arguments.debug))(work, items)

        yield spread


def _pack(arguments: argparse.Namespace) -> None:
    from moco_ray.data.pack import pack, refuse_unfit, summary
    from moco_ray.data.pack_passes import PackOptions
    from moco_ray.session import ray_session

    names = ("image_column", "label_column", "seed", "drop_duplicates", "short_side", "quality", "max_image_pixels")
    options = PackOptions(**{name: getattr(arguments, name) for name in names})
    refuse_unfit(arguments.source, arguments.target)
    with ray_session(1, arguments.debug):
        facts = pack(arguments.source, arguments.target, options)
    print(summary(facts, arguments.target))


def _bench_input(arguments: argparse.Namespace) -> None:
    from moco_ray.recipe import Recipe

    endless = ["schedule.epochs=0", "schedule.steps=1000000000", "evaluation.bank_uri=", "evaluation.query_uri="]
    words = [*arguments.overrides, f"data.uri={arguments.data}", *endless, "evaluation.every_epochs=0"]
    recipe = Recipe.read(arguments.recipe, words) if arguments.recipe else Recipe.of_overrides(words)
    from moco_ray.bench_input import as_text, bench_input, write_json

    result = bench_input(recipe.at_absolute_paths(), arguments.seconds, arguments.target, arguments.debug)
    print(as_text(result))
    if arguments.json:
        write_json(result, Path(arguments.json))


def _demo_data(arguments: argparse.Namespace) -> None:
    from moco_ray.data.demo import fashion_mnist
    from moco_ray.data.prototypes import drawn_prototypes

    target = Path(arguments.target)
    if arguments.drawn:
        summary = drawn_prototypes(target)
    else:
        summary = fashion_mnist(target, Path(arguments.source) if arguments.source else None)
    _say(f"{target}: {summary}")


def _neighbours(arguments: argparse.Namespace) -> None:
    from moco_ray.neighbours import Drawn, neighbours

    drawn = Drawn(arguments.rows, arguments.queries, arguments.nearest, arguments.seed)
    print(neighbours(arguments.place, arguments.data, drawn, arguments.output, arguments.map, arguments.debug))


def _say(*lines: str) -> None:
    for line in lines:
        note(line, sys.stdout)
