"""`moco-ray evaluate RUN`: raw pixels, the untrained and the trained encoder, judged by the same neighbours."""

import json

import torch

from moco_ray import checkpoint
from moco_ray.errors import UserError
from moco_ray.evaluate.features import backbone_of, describe_set, labelled_sets, raw_pixels
from moco_ray.evaluate.table import as_json, as_markdown, as_text, compare
from moco_ray.learner import Learner
from moco_ray.ranks import Ranks
from moco_ray.run_folder import RunFolder
from moco_ray.session import lazily_spread, ray_session

NEIGHBOURS = (20, 200)


def evaluate_run(folder: RunFolder, bank_uri: str | None, query_uri: str | None, debug: bool = False) -> str:
    """The table as text; also written into the run folder as evaluation.json and evaluation.md.

    Uses all rows of both sets, this process's device and Ray for reading. Raises UserError if the run has no
    checkpoint or no labelled sets are named.
    """
    overrides = [f"evaluation.{key}={uri}" for key, uri in (("bank_uri", bank_uri), ("query_uri", query_uri)) if uri]
    recipe = folder.recipe([*overrides, "evaluation.neighbours=1"])  # the table has its own
    if not recipe.evaluation.bank_uri:
        raise UserError("no labelled sets: give --bank FOLDER and --queries FOLDER")
    last = checkpoint.newest(folder.store)
    if last is None:
        raise UserError(
            f"{folder.place} has no checkpoint yet; wait for the first, or finish the run with `moco-ray resume`"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    untrained, trained = Learner.new(recipe, device), Learner.new(recipe, device)
    trained.load_state_dict(checkpoint.load(folder.store, last)[0])
    descriptions = {
        "raw pixels": raw_pixels,
        "untrained encoder": backbone_of(untrained.f_q.eval(), recipe, device),
        "trained encoder": backbone_of(trained.f_q.eval(), recipe, device),
    }
    with lazily_spread(1, debug) as spread:
        sets = labelled_sets(recipe, all_rows=True, spread=spread)
        with ray_session(1, debug):
            bank = describe_set(sets[0], descriptions, recipe, Ranks(device=device))
            queries = describe_set(sets[1], descriptions, recipe, Ranks(device=device))
    usable = [k for k in NEIGHBOURS if k <= len(bank.labels)]
    if not usable:
        raise UserError(
            f"the bank {recipe.evaluation.bank_uri} has {len(bank.labels)} images; kNN needs {NEIGHBOURS[0]}"
        )
    named = {name: (bank.features[name], queries.features[name]) for name in descriptions}
    rows = compare(named, bank.labels, queries.labels, usable)
    about = f"features of the backbone, step {trained.step}; {len(queries.labels)} queries, bank of {len(bank.labels)}"
    if bank.left_out + queries.left_out:
        about += f"; {bank.left_out + queries.left_out} images could not be read and are left out"
    if len(usable) < len(NEIGHBOURS):
        about += f"; no k = {NEIGHBOURS[-1]}, the bank is too small for it"
    found = {"about": about, "checkpoint": last.name, "step": trained.step, "rows": as_json(rows)}
    folder.store.write("evaluation.json", json.dumps(found, indent=1).encode())
    folder.store.write("evaluation.md", f"{as_markdown(rows)}\n\n{about}\n".encode())
    return f"{as_text(rows)}\n({about})"
