"""The recipe: every value that decides what a run computes, validated and frozen.

Responsible for reading and writing TOML, for overrides from the command line, for naming a mistake
together with its cure, and for the fingerprint that tells two recipes apart. Not responsible for
numbers that follow from the recipe (see plan.py), nor for where a run is stored and how many
workers carry it: those are arguments of the command, for they do not change the mathematics.
"""

import difflib
import hashlib
import json
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from moco_ray.errors import UserError
from moco_ray.ray_job import folder_emptied


class Section(BaseModel):
    """A frozen table of the recipe; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Encoder(Section):
    """The network f_q, and f_k with it (He et al. 2019, section 3.3; MoCo v2 for the MLP head)."""

    backbone: Literal["resnet10", "resnet18", "resnet34", "resnet50"] = "resnet50"
    stem: Literal["imagenet", "small_stride1", "small_stride2"] = "imagenet"
    head: Literal["linear", "mlp"] = "mlp"
    feature_dim: int = Field(128, ge=2)
    precision: Literal["float32", "tf32", "bfloat16", "float64"] = "float32"
    compile: bool = False  # torch.compile of both encoders: minutes at each start, for faster steps on a GPU
    warm_start: str = ""  # fingerprint of the weights that `pretrain --warm-start` began from; "": drawn from the seed


class Contrast(Section):
    """The dictionary look-up: q against its own k and the queue."""

    temperature: float = Field(0.2, gt=0.0)
    queue_keys: int = Field(65536, ge=1)
    key_momentum: float = Field(0.999, ge=0.0, le=1.0)
    symmetric: bool = False


class Batch(Section):
    """Who shares a step, and who shares BatchNorm statistics. Global sizes, always."""

    global_batch_size: int = Field(256, ge=2)
    bn_group_size: int = Field(32, ge=2)
    shuffle_domain_groups: int = Field(0, ge=0)  # 0: shuffle over all groups
    allow_batchnorm_leak: bool = False

    @property
    def groups(self) -> int:
        return self.global_batch_size // self.bn_group_size

    @model_validator(mode="after")
    def _groups_fit(self):
        if self.global_batch_size % self.bn_group_size:
            raise ValueError(
                f"batch.global_batch_size {self.global_batch_size} is not a multiple of batch.bn_group_size "
                f"{self.bn_group_size}; choose a group size that divides it, for example "
                f"{_nearest_divisor(self.global_batch_size, self.bn_group_size)}"
            )
        if self.groups == 1 and not self.allow_batchnorm_leak:
            raise ValueError(
                "one BatchNorm group over the whole batch leaks: a query and its key would share their statistics "
                "whatever the shuffle; make batch.bn_group_size smaller (an eighth of the batch is the published "
                "set-up) or ask for it with batch.allow_batchnorm_leak=true"
            )
        if self.shuffle_domain_groups and (self.shuffle_domain_groups < 2 or self.groups % self.shuffle_domain_groups):
            raise ValueError(
                f"batch.shuffle_domain_groups {self.shuffle_domain_groups} must be 0 (all groups), or at least 2 and "
                f"a divisor of the {self.groups} groups"
            )
        return self


class Optimizer(Section):
    """What moves the query encoder. As released: SGD, on every parameter alike (BatchNorm and biases decay too)."""

    name: Literal["sgd", "lars", "adamw"] = "sgd"
    learning_rate: float = Field(0.03, gt=0.0)  # what the optimizer gets; nothing scales it
    sgd_momentum: float = Field(0.9, ge=0.0, lt=1.0)  # of sgd and lars
    weight_decay: float = Field(1e-4, ge=0.0)
    gradient_reduction: Literal["exact", "bfloat16"] = "exact"  # how gradients travel between workers: bfloat16 is half the bytes, rounded
    decay_norm_and_bias: bool = True  # false: neither decays, and lars does not scale their rate

    @property
    def as_released(self) -> bool:
        """Whether it has the state of the released code's, and the rates published for that mean something."""
        return self.name == "sgd" and self.decay_norm_and_bias

    @model_validator(mode="after")
    def _momentum_is_read(self):
        if self.name == "adamw" and self.sgd_momentum != Optimizer.model_fields["sgd_momentum"].default:
            raise ValueError(
                f"optimizer.sgd_momentum {self.sgd_momentum} is of sgd and lars, and optimizer.name is adamw (betas 0.9 and 0.999); leave it out"
            )
        return self


class Schedule(Section):
    """How long the run is, in epochs or in steps, and how the learning rate moves over it."""

    epochs: int = Field(0, ge=0)
    steps: int = Field(0, ge=0)
    shape: Literal["cosine", "multistep"] = "cosine"
    warmup_steps: int = Field(0, ge=0)
    milestone_epochs: tuple[int, ...] = ()
    milestone_factor: float = Field(0.1, gt=0.0, le=1.0)

    @model_validator(mode="after")
    def _one_length(self):
        if bool(self.epochs) == bool(self.steps):
            raise ValueError(
                "the length of a run is schedule.epochs or schedule.steps: give exactly one of the two, above 0"
            )
        if (self.shape == "multistep") != bool(self.milestone_epochs):
            raise ValueError('schedule.milestone_epochs goes with schedule.shape="multistep", and only with it')
        if list(self.milestone_epochs) != sorted(set(self.milestone_epochs)) or any(
            e < 1 for e in self.milestone_epochs
        ):
            raise ValueError(f"schedule.milestone_epochs {list(self.milestone_epochs)} must rise and be at least 1")
        return self


class Augment(Section):
    """The two-view augmentation. Defaults are MoCo v2's; v1 differs in jitter, order and blur."""

    image_pixels: int = Field(224, ge=8)
    crop_scale: tuple[float, float] = (0.2, 1.0)
    jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.4, 0.1)  # brightness, contrast, saturation, hue
    jitter_probability: float = Field(0.8, ge=0.0, le=1.0)
    grayscale_probability: float = Field(0.2, ge=0.0, le=1.0)
    grayscale_first: bool = False  # v1: grayscale comes before the jitter
    blur_probability: float = Field(0.5, ge=0.0, le=1.0)
    blur_sigma: tuple[float, float] = (0.1, 2.0)  # pixels
    flip_probability: float = Field(0.5, ge=0.0, le=1.0)
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)

    @model_validator(mode="after")
    def _ranges(self):
        low, high = self.crop_scale
        if not 0.0 < low <= high <= 1.0:
            raise ValueError(f"augment.crop_scale {list(self.crop_scale)} must be two areas with 0 < low <= high <= 1")
        if min(self.jitter) < 0.0 or max(self.jitter[:3]) > 1.0 or self.jitter[3] > 0.5:
            raise ValueError(f"augment.jitter {list(self.jitter)} must be >= 0, at most 1 (hue: at most 0.5)")
        if not 0.0 < self.blur_sigma[0] <= self.blur_sigma[1]:
            raise ValueError(f"augment.blur_sigma {list(self.blur_sigma)} must be two sigmas with 0 < low <= high")
        if min(self.std) <= 0.0:
            raise ValueError(f"augment.std {list(self.std)} must be above 0")
        return self


class Data(Section):
    """Where the unlabelled images lie and how they are read."""

    uri: str = ""
    image_column: str = "image"
    max_bad_rows_fraction: float = Field(0.01, ge=0.0, le=1.0)  # of an epoch's rows
    max_image_pixels: int = Field(100_000_000, ge=1)  # a larger image counts as bad before it is decoded


class Evaluation(Section):
    """kNN of the query backbone's features on a separate labelled set, while training."""

    bank_uri: str = ""
    query_uri: str = ""
    label_column: str = "label"
    every_epochs: int = Field(0, ge=0)  # 0: only at the end. The end is judged wherever the two URIs are given: without them nothing is
    bank_rows: int = Field(0, ge=0)  # 0: all; otherwise the first so many of a seeded order
    query_rows: int = Field(0, ge=0)
    neighbours: int = Field(200, ge=1)
    temperature: float = Field(0.1, gt=0.0)
    timeout_minutes: float = Field(60.0, gt=0.0)  # for one evaluation beside the training
    resize_pixels: int = Field(256, ge=8)  # the shorter side, before the centre crop of augment.image_pixels

    @model_validator(mode="after")
    def _both_sets(self):
        if bool(self.bank_uri) != bool(self.query_uri):
            raise ValueError("evaluation.bank_uri and evaluation.query_uri go together: give both or neither")
        if self.every_epochs and not self.bank_uri:
            raise ValueError("evaluation.every_epochs needs evaluation.bank_uri and evaluation.query_uri")
        return self


class Run(Section):
    """How the run is carried, watched and kept. Only `seed` changes what is computed."""

    seed: int = Field(0, ge=0, lt=2**32)
    groups_per_forward: int = Field(0, ge=0)  # 0: all groups of a rank in one forward pass
    memory_format: Literal["contiguous", "channels_last"] = "channels_last"
    log_every_steps: int = Field(10, ge=1)
    dictionary_every_steps: int = Field(10, ge=0)  # between two looks at the dictionary's health; 0: none
    images_every_steps: int = Field(500, ge=0)  # pictures and histograms for TensorBoard, from the first step on, also with the queue just full and at the end; 0: none
    checkpoint_every_steps: int = Field(1000, ge=1)
    checkpoint_every_minutes: float = Field(10.0, ge=0.0)  # at the latest, since the last; 0: by steps alone
    keep_checkpoints: int = Field(3, ge=1)
    hang_timeout_seconds: float = Field(120.0, gt=0.0)  # then a silent worker is given up, or after 20 steps


class Recipe(Section):
    """All sections. `Recipe.read` for a file, `Recipe.parse` for a dictionary."""

    encoder: Encoder = Encoder()
    contrast: Contrast = Contrast()
    batch: Batch = Batch()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule
    augment: Augment = Augment()
    data: Data = Data()
    evaluation: Evaluation = Evaluation()
    run: Run = Run()

    @model_validator(mode="after")
    def _evaluation_crop_fits(self):
        evaluation, pixels = self.evaluation, self.augment.image_pixels
        if evaluation.bank_uri and evaluation.resize_pixels < pixels:
            raise ValueError(
                f"evaluation.resize_pixels {evaluation.resize_pixels} is smaller than the crop of augment.image_pixels "
                f"{pixels}; make it at least as large"
            )
        return self

    @classmethod
    def read(cls, path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> "Recipe":
        """Read a TOML file and apply `section.key=value` overrides. Raises UserError."""
        path = Path(path)
        if not path.is_file():
            cure = (not path.is_absolute() and folder_emptied()) or "the presets lie in jobs/, for example jobs/moco_v2_imagenet.toml"
            raise UserError(f"no recipe at {path}; {cure}")
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not valid TOML: {error}") from error
        return cls.of_text(text, str(path), overrides)

    @classmethod
    def of_text(cls, text: str, source: str, overrides: list[str] | tuple[str, ...] = ()) -> "Recipe":
        """The same from TOML as text; `source` is what messages call it."""
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise UserError(f"{source} is not valid TOML: {error}") from error
        for override in overrides:
            apply_override(values, override)
        return cls.parse(values, source=source)

    @classmethod
    def of_overrides(cls, overrides: list[str]) -> "Recipe":
        """The defaults (MoCo v2) with `section.key=value` overrides. Raises UserError."""
        values: dict[str, Any] = {}
        for override in overrides:
            apply_override(values, override)
        return cls.parse(values, source="the command line")

    @classmethod
    def parse(cls, values: dict[str, Any], source: str = "the recipe") -> "Recipe":
        """Validate a nested dictionary. Raises UserError that names the first mistake and its cure."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise UserError(f"{source}: {explain(error, field_names() + list(cls.model_fields))}") from error

    def at_absolute_paths(self) -> "Recipe":
        """The same recipe with its local folders as absolute paths: workers run in another folder."""
        values = self.model_dump()
        for section, key in (("data", "uri"), ("evaluation", "bank_uri"), ("evaluation", "query_uri")):
            place = values[section][key]
            if place and "://" not in place:
                values[section][key] = str(Path(place).expanduser().absolute())
        return Recipe.model_validate(values)

    def toml(self) -> str:
        """The resolved recipe as TOML, every value written out; `Recipe.parse` of it is equal."""
        lines = []
        for section, table in self.model_dump(mode="json").items():
            lines += [
                f"[{section}]",
                *(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in table.items()),
                "",
            ]
        return "\n".join(lines)

    def fingerprint(self) -> str:
        """SHA-256 of the values that decide what is computed, as 16 hex digits.

        Left out: the data's address (the manifest's fingerprint stands for the data), how many bad rows are
        put up with, the evaluation, whether encoders are compiled, and in `run` all but the seed. So an interrupted run may be
        resumed with other intervals, another `groups_per_forward` or from a copy of its data, and with nothing else changed.
        """
        values = self.model_dump(mode="json")
        for section, key in _FREE:
            del values[section][key]
        for (section, key), before in _ADDED.items():
            if values[section][key] == before:
                del values[section][key]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    def differences(self, other: "Recipe") -> list[str]:
        """`section.key: mine, not theirs` for every value that the fingerprint covers and that differs."""
        mine, theirs = self.model_dump(mode="json"), other.model_dump(mode="json")
        return [
            f"{section}.{key}: {mine[section][key]!r}, not {theirs[section][key]!r}"
            for section in mine
            for key in mine[section]
            if mine[section][key] != theirs[section][key] and (section, key) not in _FREE
        ]


_ADDED = {  # by later releases, with what was computed before: there the fingerprint stays as it was
    ("encoder", "warm_start"): "",
    ("optimizer", "name"): "sgd",
    ("optimizer", "gradient_reduction"): "exact",
    ("optimizer", "decay_norm_and_bias"): True,
}
_FREE = [  # what a resumed run may change
    ("encoder", "compile"),  # the same numbers, but for the order of sums
    ("data", "uri"),
    ("data", "max_bad_rows_fraction"),
    *(("evaluation", key) for key in Evaluation.model_fields),
    *(("run", key) for key in Run.model_fields if key != "seed"),
]


def field_names() -> list[str]:
    """Every recipe field as `section.key`."""
    return [f"{s}.{k}" for s, f in Recipe.model_fields.items() for k in f.annotation.model_fields]


def apply_override(values: dict[str, Any], override: str, example: str = "optimizer.learning_rate=0.06") -> None:
    """Put `section.key=value` into a nested dictionary. Raises UserError, with the example, for what is none."""
    name, equals, text = override.partition("=")
    section, dot, key = name.strip().partition(".")
    if not equals or not dot:
        raise UserError(
            f"override {override!r} is not of the form section.key=value, for example {example}"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string: data.uri=/images needs no quotes
    table = values.setdefault(section, {})
    if not isinstance(table, dict):
        raise UserError(f"[{section}] must be a table")
    table[key] = value


def explain(error: ValidationError, known: list[str]) -> str:
    """The first mistake and its cure; of the `known` keys the nearest is named."""
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        return f"unknown key {name!r}; the nearest known one is {near!r}"
    if first["type"] == "missing":
        return f"[{name}] is missing; give it at least schedule.epochs or schedule.steps"
    message = first["msg"].removeprefix("Value error, ")
    if name.count(".") >= 1:
        message = f"{name} = {first['input']!r}: {message[0].lower()}{message[1:]}"
    if first["type"] == "literal_error" and isinstance(first["input"], str):
        near = difflib.get_close_matches(first["input"], _choices(first), n=1, cutoff=0.0)
        message += f"; the nearest is {near[0]!r}" if near else ""
    return message


def _choices(error: Any) -> list[str]:
    return [word.strip("'") for word in error["ctx"]["expected"].replace(" or ", ", ").split(", ")]


def _nearest_divisor(number: int, wanted: int) -> int:
    return min((d for d in range(2, number + 1) if number % d == 0), key=lambda d: abs(d - wanted))
