"""A run that begins from a backbone instead of drawn weights: of another run, or imported from another trainer.

Responsible for the file in the run folder that holds it, for its part in the recipe, and for putting it into a new learner. The
projection head, the queue and the optimizer begin anew. Not responsible for reading other people's files (foreign.py).
"""

from moco_ray.backbone import Backbone
from moco_ray.errors import UserError
from moco_ray.learner import Learner
from moco_ray.recipe import Recipe
from moco_ray.run_folder import RunFolder

FILE = "warm-start.safetensors"


def begun_from(recipe: Recipe, backbone: Backbone | None) -> Recipe:
    """The recipe of a run that begins from `backbone` (None: from drawn weights); its fingerprint covers the weights.

    Raises UserError if it is another network.
    """
    encoder = recipe.encoder
    if backbone is None:
        if encoder.warm_start:
            raise UserError("encoder.warm_start is filled in by --warm-start FILE; give that instead")
        return recipe
    if (backbone.name, backbone.stem) != (encoder.backbone, encoder.stem):
        raise UserError(
            f"the weights of --warm-start are of a {backbone.name} with stem {backbone.stem}, and the recipe has a {encoder.backbone} "
            f"with {encoder.stem}; give encoder.backbone={backbone.name} encoder.stem={backbone.stem}, or other weights"
        )
    encoder = encoder.model_copy(update={"warm_start": backbone.fingerprint()})
    return recipe.model_copy(update={"encoder": encoder})


def keep(folder: RunFolder, backbone: Backbone) -> None:
    """Write it into a run folder, before the run is one."""
    folder.store.write(FILE, backbone.to_bytes())


def warm_start(learner: Learner, folder: RunFolder, recipe: Recipe) -> None:
    """Give both encoders of a new learner the run's backbone. Raises UserError if that is not what the run began with."""
    place = folder.store.place(FILE)
    backbone = Backbone.of_bytes(folder.store.read(FILE), place)
    if backbone.fingerprint() != recipe.encoder.warm_start:
        raise UserError(f"{place} is not what the run began with ({recipe.encoder.warm_start}); put it back, or start a new run")
    learner.f_q.backbone.load_state_dict(backbone.tensors)  # into the learner's own precision
    learner.f_k.load_state_dict(learner.f_q.state_dict())
