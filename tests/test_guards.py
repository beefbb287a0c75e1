"""Guards over the source itself: who may import whom, and the recipe's fields."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from moco_ray import recipe as recipe_module
from moco_ray.recipe import Recipe

PACKAGE = Path(__file__).parent.parent / "moco_ray"
FILES = sorted(PACKAGE.rglob("*.py"))

# Imports point down: a module may import modules of lower layers, and its own package.
LAYERS = [
    ["errors", "layouts", "interface", "words", "source", "ray_job"],
    ["recipe"],
    ["plan", "ranks", "placement", "data.batch", "parts", "cluster_facts", "stages"],
    ["method", "data", "traffic"],
    ["learner", "pace", "attempts", "standing", "exhibit", "dictionary", "verdicts", "ahead", "scaling"],
    ["train", "checkpoint", "lease", "meter", "evaluate"],
    ["lookout", "saver", "leak_probe", "step_profile"],
    ["trial", "tensorboard_page", "pictures", "health", "gauges"],
    ["checks", "grafana"],
    ["monitor", "run_folder", "show_plan", "session", "cluster"],
    ["board", "backbone", "record", "submit", "show_scale"],
    ["detectron2_configs", "detection", "runs", "frame"],
    ["export", "foreign", "beside", "warm_start", "compare", "tidy", "watch", "doctor_run"],
    ["released"],
    ["evaluations", "events", "progress"],
    ["worker"],
    ["desk", "stopping", "asking", "process_group", "restarts", "train_worker", "probe_worker", "doctor_worker"],
    ["launch"],
    ["launch_probe", "launch_doctor"],
    ["doctor", "evaluate_run", "bench_input", "detect"],
    ["neighbours", "probe_run"],
    ["cli_backbone", "cli_evaluate", "cli_health", "cli_runs", "cli_submit"],
    ["cli"],
    ["__main__"],
]
FORBIDDEN = {  # top-level module: files that may import it
    # the last four: training on labels, and the doctor's steps, each with a worker and a driver of its own
    "ray.train": {"launch.py", "asking.py", "process_group.py", "restarts.py", "train_worker.py", "launch_probe.py", "probe_worker.py", "launch_doctor.py", "doctor_worker.py"},
    "ray.data": {"data/stream.py", "data/pack.py", "beside.py", "cluster.py"},  # the last: where its actors live, nothing of data
    "ray": {"data/stream.py", "data/pack.py", "data/on_ray.py", "session.py", "launch.py", "board.py", "cluster.py", "desk.py", "train_worker.py",
            "asking.py", "process_group.py", "beside.py", "evaluations.py", "restarts.py", "gauges.py", "launch_probe.py", "probe_worker.py",
            "launch_doctor.py", "doctor_worker.py", "submit.py"},
    "ray.util.metrics": {"gauges.py"},
    "torch.distributed": {"ranks.py"},
}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def layer_of(module: str) -> int:
    for length in (2, 1):  # data.batch before data
        prefix = ".".join(module.split(".")[:length])
        for number, names in enumerate(LAYERS):
            if prefix in names:
                return number
    raise AssertionError(f"{module} is in no layer: put it into LAYERS")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def upward(module: str, imported: list[str]) -> list[str]:
    ours = [name.removeprefix("moco_ray.") for name in imported if name.startswith("moco_ray.")]
    own = module.split(".")[0]
    return [n for n in ours if n.split(".")[0] != own and layer_of(n) >= layer_of(module)]


def test_imports_point_down_only():
    wrong = {name_of(f): upward(name_of(f), list(imports(f))) for f in FILES if f.stem != "__init__"}
    assert {module: names for module, names in wrong.items() if names} == {}
    assert upward("train", ["moco_ray.launch.pretrain"]) == ["launch.pretrain"]  # the guard can fail


def test_ray_train_ray_data_and_torch_distributed_are_known_to_few_files():
    for path in FILES:
        for name in imports(path):
            for module, allowed in FORBIDDEN.items():
                if name == module or name.startswith(module + "."):
                    assert str(path.relative_to(PACKAGE)) in allowed, f"{path} imports {name}"


FIELDS = {
    "encoder": ["backbone", "stem", "head", "feature_dim", "precision", "compile", "warm_start"],
    "contrast": ["temperature", "queue_keys", "key_momentum", "symmetric"],
    "batch": ["global_batch_size", "bn_group_size", "shuffle_domain_groups", "allow_batchnorm_leak"],
    "optimizer": ["name", "learning_rate", "sgd_momentum", "weight_decay", "gradient_reduction", "decay_norm_and_bias"],
    "schedule": ["epochs", "steps", "shape", "warmup_steps", "milestone_epochs", "milestone_factor"],
    "augment": [
        "image_pixels", "crop_scale", "jitter", "jitter_probability", "grayscale_probability", "grayscale_first",
        "blur_probability", "blur_sigma", "flip_probability", "mean", "std",
    ],
    "data": ["uri", "image_column", "max_bad_rows_fraction", "max_image_pixels"],
    "evaluation": [
        "bank_uri", "query_uri", "label_column", "every_epochs", "bank_rows", "query_rows", "neighbours", "temperature",
        "timeout_minutes", "resize_pixels",
    ],
    "run": [
        "seed", "groups_per_forward", "memory_format", "log_every_steps", "dictionary_every_steps", "images_every_steps", "checkpoint_every_steps",
        "checkpoint_every_minutes", "keep_checkpoints", "hang_timeout_seconds",
    ],
}  # fmt: skip


def test_recipe_fields_are_these_and_a_new_one_needs_a_reason():
    """A setting exists only if two real jobs need two values: think before you extend the list."""
    assert {s: list(f.annotation.model_fields) for s, f in Recipe.model_fields.items()} == FIELDS


CLASSES = {field.annotation.__name__: section for section, field in Recipe.model_fields.items()}


def sections_of(expression: ast.AST, names: dict[str, str]) -> str | None:
    """The recipe section that an expression is, if it is one: `<anything>.section`, or a name bound to one."""
    if isinstance(expression, ast.Attribute) and expression.attr in FIELDS:
        return expression.attr
    return names.get(expression.id) if isinstance(expression, ast.Name) else None


def fields_read(tree: ast.AST) -> set[str]:
    """`section.key` of every read through a section, an alias of one, or an argument annotated as one."""
    read: set[str] = set()
    for function in [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]:
        names: dict[str, str] = {}
        for argument in [*function.args.args, *function.args.kwonlyargs]:
            annotation = argument.annotation
            label = annotation.attr if isinstance(annotation, ast.Attribute) else getattr(annotation, "id", None)
            if label in CLASSES:
                names[argument.arg] = CLASSES[label]
        for node in ast.walk(function):
            if isinstance(node, ast.Assign):
                targets = node.targets[0]
                several = isinstance(targets, ast.Tuple) and isinstance(node.value, ast.Tuple)
                pairs = zip(targets.elts, node.value.elts, strict=True) if several else [(targets, node.value)]
                for target, value in pairs:
                    if isinstance(target, ast.Name) and (section := sections_of(value, names)):
                        names[target.id] = section
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and (section := sections_of(node.value, names)):
                read.add(f"{section}.{node.attr}")
    return read


def test_every_recipe_field_is_read_by_the_code_that_needs_it():
    read = set().union(*(fields_read(ast.parse(f.read_text())) for f in FILES if f.name != "recipe.py"))
    unread = {f"{section}.{key}" for section, keys in FIELDS.items() for key in keys} - read
    assert unread == {"batch.allow_batchnorm_leak"}  # a permission: read where the recipe is validated
    assert "self.allow_batchnorm_leak" in Path(recipe_module.__file__).read_text()


@pytest.mark.parametrize("line,expected", [("recipe.run.seed", {"run.seed"}), ("seed", set()), ("plan.seed", set())])
def test_a_field_counts_as_read_only_through_its_section(line, expected):
    assert fields_read(ast.parse(f"def f(recipe, plan, seed):\n    return {line}")) == expected
