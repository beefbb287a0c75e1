"""The words of `moco-ray submit`, and what of them is wrong before a cluster is asked. Not here: the job itself (submit.py)."""

import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path

from moco_ray.errors import UserError

PLACES = {  # of a command's arguments -> what its user calls them
    **{name: f"--{name.replace('_', '-')}" for name in ("storage", "data", "output", "bank", "queries", "warm_start", "images", "annotations")},
    **dict.fromkeys(("place", "folder"), "RUN"), "source": "SOURCE", "target": "TARGET", "file": "FILE", "go_on_from": "--continue",
}  # fmt: skip
SCRIPT_PLACES = ("IMAGES", "STORAGE", "BANK", "QUERIES", "BACKBONE", "ANNOTATIONS", "OUTPUT", "TEST_IMAGES", "TEST_ANNOTATIONS")  # variables of jobs/*.sh
DECLARED = re.compile(r"^(?:\( ?)?: .*", re.M)  # a line of a script that stands outside of any `if`, and only asks for variables: : "${NAME:?why}"
SHARED = "give a URI, or the whole path of a folder that all nodes share"
NOT_AS_JOBS = ("submit", "watch", "runs")
ABOUT = (
    "run a command as a job of a Ray cluster and follow its log: `moco-ray submit --address http://HEAD:8265 jobs/NAME.toml --data s3://.. "
    "--storage s3://..` (a recipe stands for pretrain), or any other command with its words, or a shell script of this machine"
)


def submit_command(command: Callable[..., argparse.ArgumentParser], checked: Callable[[list[str]], argparse.Namespace]) -> None:
    """Add `submit`; `checked(words)` parses the words of a command as if it ran here."""
    submit = command("submit", lambda arguments: _submit(arguments, checked), ABOUT)
    _options(submit)
    submit.add_argument("words", nargs=argparse.REMAINDER, metavar="WORDS", help="RECIPE.toml, COMMAND or SCRIPT.sh, with their own words; options of submit may stand among them")


def _options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--address", metavar="URL", help="the cluster's dashboard, http://HEAD:8265 (RAY_API_SERVER_ADDRESS, or RAY_ADDRESS)")
    parser.add_argument("--job-id", metavar="ID", help="a name for the job that none had before (the run's name and the time)")
    parser.add_argument(
        "--env", action="append", metavar="NAME[=VALUE]", help="a variable for the driver and all tasks; without =VALUE as it is here. Who sees the dashboard sees it: roles are better for credentials"
    )
    parser.add_argument("--use-image", action="store_true", help="the moco_ray that is installed on the cluster (this one's source goes along)")
    parser.add_argument("--stop-seconds", type=int, metavar="SECONDS", help="that `ray job stop` leaves the run to write a last checkpoint (60)")
    parser.add_argument("--no-wait", action="store_true", help="leave once it is submitted")
    return parser


def _submit(arguments: argparse.Namespace, checked: Callable[[list[str]], argparse.Namespace]) -> int:
    options = _options(argparse.ArgumentParser(prog="moco-ray submit", add_help=False, allow_abbrev=False))
    _, words = options.parse_known_args([word for word in arguments.words if word != "--"], namespace=arguments)
    address = arguments.address or os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS")
    if not words:
        raise UserError("nothing to submit: give a recipe, a command or a script, for example `moco-ray submit jobs/demo.toml ..`")
    if not address:
        raise UserError("no cluster: give --address http://HEAD:8265, the address of its dashboard")
    order = order_of(words, checked, variables(arguments.env or [], arguments.stop_seconds))
    from moco_ray.submit import submit

    return submit(address, order, arguments.job_id or "", arguments.use_image, not arguments.no_wait)


def order_of(words: list[str], checked: Callable[[list[str]], argparse.Namespace], environment: dict[str, str]):
    """What is sent for the words of a command (a `submit.Order`). Raises UserError for what can be told here to be wrong."""
    from moco_ray.submit import SCRIPT, UPLOADED, Order

    if words[0].endswith(".toml"):
        words = ["pretrain", *words]
    files = list(dict.fromkeys(Path(word) for word in words if word.endswith(UPLOADED) and Path(word).is_file()))
    if words[0].endswith(SCRIPT) and files[:1] == [Path(words[0])]:
        environment = with_recipe(words, files, environment)
    names = [file.name for file in files]
    if len(set(names)) < len(names):
        raise UserError(f"two files would go along as {max(names, key=names.count)}; rename one")
    sent = [Path(word).name if Path(word) in files else word for word in words]
    if words[0].endswith(SCRIPT):
        if not Path(words[0]).is_file():
            raise UserError(f"{words[0]} is not a file of this machine; give the path of the script")
        refuse_variables(Path(words[0]), names, environment)
        return Order(sent, Path(words[0]).stem, files, {"command": words[0]}, environment)
    if words[0] in NOT_AS_JOBS:
        raise UserError(f"`{words[0]}` runs on any machine, without a cluster: give it without submit")
    arguments = checked(words)
    refuse_local_places(arguments)
    file = {"pretrain": "recipe", "doctor": "what"}.get(words[0], "")  # the argument that is a recipe's file
    file = getattr(arguments, file) if file else ""
    if file.endswith(".toml") and not arguments.storage:
        raise UserError(f"--storage is not given, and its default, runs, is a folder that only one machine of the cluster would see; {SHARED}")
    facts, name = {"command": words[0]}, words[0]
    if file.endswith(".toml"):
        from moco_ray.plan import Workers
        from moco_ray.recipe import Recipe

        Workers.of(arguments.workers or "1")
        recipe = Recipe.read(file, arguments.overrides + ([f"data.uri={arguments.data}"] if arguments.data else []))
        refuse_local("data.uri", recipe.data.uri)
        refuse_local("evaluation.bank_uri", recipe.evaluation.bank_uri)
        refuse_local("evaluation.query_uri", recipe.evaluation.query_uri)
        if words[0] == "pretrain":
            name = arguments.name or Path(file).stem
            facts |= {"recipe": Path(file).name, "recipe_fingerprint": recipe.fingerprint(), "run": f"{arguments.storage.rstrip('/')}/{name}"}
    elif place := getattr(arguments, "place", None) or getattr(arguments, "folder", None):
        facts["run"], name = place, f"{words[0]}-{place.rstrip('/').rpartition('/')[2]}"
    return Order(sent, "".join(c if c.isalnum() or c in "-_." else "-" for c in name), files, facts, environment)


def refuse_local_places(arguments: argparse.Namespace) -> None:
    """Raise UserError for a place that the words give, or that the command takes by itself, and that only this machine could mean."""
    for name, called in PLACES.items():
        refuse_local(called, getattr(arguments, name, None) or "")
    if getattr(arguments, "to", None) and not arguments.output:
        raise UserError("export as a job needs --output: a URI, or a path that all nodes share; the job's own folder goes with it")


def with_recipe(words: list[str], files: list[Path], environment: dict[str, str]) -> dict[str, str]:
    """The variables of a script whose RECIPE is a file that lies in the job's folder: put into `files`, if it is not there already.

    Raises UserError for a recipe that is no file here, and for what is wrong in it.
    """
    from moco_ray.recipe import Recipe
    from moco_ray.source import PACKAGE

    given = environment.get("RECIPE", "")
    if not given or not re.search(r"\$\{?RECIPE\b", _text(files[0])):
        return environment
    places = [*(file for file in files if file.name == given), Path(given), PACKAGE.parent / given]
    file = next((place for place in places if place.is_file()), None)
    if file is None and given.startswith("/"):  # of a folder that all nodes share, perhaps
        return environment
    if file is None:
        raise UserError(f"--env RECIPE={given}: no such file is here to go along; give its path, as --env RECIPE=jobs/moco_v2_imagenet.toml")
    recipe = Recipe.read(file, [word for word in words if word.partition(".")[0] in Recipe.model_fields and "=" in word])
    for what in ("bank_uri", "query_uri"):
        refuse_local(f"evaluation.{what} of {given}", getattr(recipe.evaluation, what))
    if all(file.resolve() != other.resolve() for other in files):
        files.append(file)
    return environment | {"RECIPE": file.name}


def refuse_variables(script: Path, sent: list[str], environment: dict[str, str]) -> None:
    """Raise UserError for a variable that the script declares and its job would not have, and for a place that only this machine could mean.

    `sent`: names of the files that lie in the job's folder.
    """
    text = _text(script)
    declared = dict.fromkeys(name for line in DECLARED.findall(text) for name in re.findall(r"\$\{(\w+):\?", line))
    missing = [name for name in declared if not environment.get(name) and not re.search(rf"^\s*(export )?{name}=", text, re.M)]
    if missing:
        raise UserError(f"{script} needs {', '.join(missing)}; give {' '.join(f'--env {name}=..' for name in missing)}, also what the cluster's nodes have themselves")
    for name in SCRIPT_PLACES:
        if environment.get(name) not in sent and re.search(rf"\$\{{?{name}\b", text):
            refuse_local(f"--env {name}", environment.get(name, ""))


def _text(script: Path) -> str:
    return script.read_text(errors="replace")


def refuse_local(what: str, place: str) -> None:
    if place and "://" not in place and not place.startswith("/"):
        raise UserError(f"{what} is {place}, a path of this machine, which the cluster does not see; {SHARED}")


def variables(words: list[str], stop_seconds: int | None) -> dict[str, str]:
    """NAME=VALUE, or NAME for what it is here. Raises UserError for a name that is not set here."""
    found = {} if stop_seconds is None else {"RAY_JOB_STOP_WAIT_TIME_S": str(stop_seconds)}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or (not equals and name not in os.environ):
            raise UserError(f"--env {word}: there is no such variable here; give NAME=VALUE")
        found[name] = value if equals else os.environ[name]
    return found
