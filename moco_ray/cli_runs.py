"""The words of `moco-ray runs` and `moco-ray watch`, and the question before anything is removed. Not here: what they do (runs.py,
compare.py, tidy.py, watch.py).
"""

import argparse
import contextlib
import json
import time
from collections.abc import Callable

from moco_ray.errors import UserError
from moco_ray.words import note, plural, say, size


def runs_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `runs`."""
    runs = command("runs", _runs, "list the runs of a storage, compare two, or remove what they no longer need")
    runs.add_argument("storage", metavar="STORAGE", help="folder or URI that holds the run folders, as for pretrain")
    does = runs.add_mutually_exclusive_group()
    does.add_argument("--compare", nargs=2, metavar=("A", "B"), help="two runs by name: recipe, data, code, and metrics at the same steps")
    does.add_argument(
        "--prune", nargs="+", metavar="NAME", help="remove superfluous checkpoints of these runs; the newest that reads and the best one stay"
    )
    runs.add_argument("--yes", action="store_true", help="with --prune: do not ask")
    runs.add_argument("--json", action="store_true", help="the list for a program")


def watch_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `watch`."""
    watch = command("watch", _watch, "show a run as it goes on, from any machine that can read its storage")
    watch.add_argument("place", metavar="RUN", help="run folder: storage/name")
    watch.add_argument("--once", action="store_true", help="print it as it is now, and leave")


def _runs(arguments: argparse.Namespace) -> None:
    if arguments.yes and not arguments.prune:
        raise UserError("--yes answers the question of --prune, and there is no --prune; leave it out")
    if arguments.json and (arguments.prune or arguments.compare):
        raise UserError("--json is of the list alone; leave it or --prune and --compare out")
    if arguments.prune:
        _prune(arguments.storage, list(dict.fromkeys(arguments.prune)), arguments.yes)
    elif arguments.compare:
        from moco_ray.compare import compare

        say(compare(arguments.storage, *arguments.compare))
    else:
        from moco_ray.runs import as_json, as_table, list_runs

        runs = list_runs(arguments.storage)
        say(json.dumps(as_json(runs), indent=1) if arguments.json else as_table(runs, time.time()))


def _prune(storage: str, names: list[str], yes: bool) -> None:
    """Say what would go, ask, and remove it; nobody can carry the runs meanwhile."""
    from moco_ray.runs import run_in
    from moco_ray.tidy import tidying

    folders = [run_in(storage, name) for name in names]
    with contextlib.ExitStack() as held:
        found = []
        for name, folder in zip(names, folders, strict=True):
            tidy = held.enter_context(tidying(folder.store, note))
            found.append(tidy)
            print(f"{name}: stays: {tidy.kept}")
            for one in tidy.superfluous:
                print(f"  {size(one.bytes):>8}  {one.name}  ({one.why})")
            if not tidy.superfluous:
                print("  nothing is superfluous")
        files = sum(len(tidy.superfluous) for tidy in found)
        what = f"{plural(files, 'file')}, {size(sum(tidy.bytes for tidy in found))}"
        if not files:
            return
        if not yes and not _agreed(f"remove {what}? [y/N] "):
            print("nothing was removed")
            return
        for tidy in found:
            tidy.remove()
        print(f"removed {what}")


def _agreed(question: str) -> bool:
    """Raises UserError where nobody can answer."""
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        print()
        raise UserError("nobody answered, and nothing was removed; --yes removes without asking") from None


def _watch(arguments: argparse.Namespace) -> None:
    from moco_ray.watch import watch

    watch(arguments.place, arguments.once)
