"""The commands about the health of runs: doctor. Not here: what they do."""

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path

from moco_ray.errors import UserError
from moco_ray.words import say


def health_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add them; `command` makes a parser from a name, a function and a line of help."""
    doctor = command("doctor", _doctor, "before a run: check recipe, data, storage and machines, with one step on every worker; of a run: what went wrong")
    doctor.add_argument("what", metavar="RECIPE|RUN", help="TOML file of a run that is to be started, or the folder of one that was")
    doctor.add_argument("--data", metavar="URI", help="short for data.uri=URI")
    doctor.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for example optimizer.learning_rate=0.06")
    doctor.add_argument("--workers", metavar="N|MIN:MAX", help="Ray Train workers, as for pretrain (1)")
    doctor.add_argument("--storage", metavar="URI", help="folder or URI that is to hold the run folder (runs)")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")


def _doctor(arguments: argparse.Namespace) -> int:
    """0 if nothing failed, else 1."""
    what = arguments.what
    if not (Path(what).is_file() or what.endswith(".toml")):
        return _doctor_run(arguments)
    from moco_ray.recipe import Recipe

    overrides = arguments.overrides + ([f"data.uri={arguments.data}"] if arguments.data else [])
    recipe = Recipe.read(what, overrides)
    from moco_ray.checks.finding import (  # seconds of imports: mistakes in the recipe are told before
        as_json,
        as_table,
        exit_code,
    )
    from moco_ray.doctor import doctor
    from moco_ray.plan import Workers

    findings = doctor(recipe, arguments.storage or "runs", Workers.of(arguments.workers or "1"), arguments.debug)
    say(as_json(findings) if arguments.json else as_table(findings, shutil.get_terminal_size((100, 24)).columns))
    return exit_code(findings)


def _doctor_run(arguments: argparse.Namespace) -> int:
    from moco_ray.data.storage import Store
    from moco_ray.run_folder import FACTS

    if Store.at(arguments.what).size(FACTS) is None:
        raise UserError(f"{arguments.what} is neither a recipe (a TOML file) nor a run folder (it has no {FACTS}); the presets lie in jobs/")
    given = [name for name in ("data", "workers", "storage") if getattr(arguments, name)] + arguments.overrides
    if given:
        raise UserError(f"doctor RUN looks at a run as it was and takes no {given[0]}; give a recipe to check a new one")
    from moco_ray.doctor_run import report

    return report(arguments.what, arguments.json)
