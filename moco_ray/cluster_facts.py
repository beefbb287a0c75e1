"""The facts of a cluster that a run's speed is predicted from: what was measured, what was published, what is only assumed.

Responsible for their names, units, defaults and where each default comes from, and for reading them from TOML. Not responsible
for what follows from them (scaling.py). Nobody has measured any of this on a GPU: put your own figures in their places.
"""

import tomllib
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from moco_ray.errors import UserError
from moco_ray.recipe import Section, apply_override, explain

EXAMPLE = "gpu.images_per_second=1500"


class Gpu(Section):
    """One GPU that trains, when it waits for nobody."""

    images_per_second: float = Field(
        168.0, gt=0, description="published: MoCo's 200 epochs of ImageNet in 53 hours on 8 V100, all waits included; the only figure there is"
    )  # both encoders' forward passes, backward, loss; the symmetric form does that twice
    fixed_seconds: float = Field(0.0, ge=0, description="assumed: of a step, whatever its rows (optimizer, momentum update); in the rate above")
    backward_share: float = Field(0.5, ge=0, le=1, description="derived: of the time for rows, two of the four passes' worth of operations")


class Node(Section):
    """A machine with GPUs."""

    gpus: int = Field(8, ge=1, description="assumed: as the paper's machine")
    cores: int = Field(32, ge=1, description="assumed: physical ones; a cloud's vCPU is often half")
    cores_per_worker: float = Field(1.0, ge=0, description="assumed: for a worker and Ray, not for input")


class Link(Section):
    """Between GPUs of one machine: what nccl-tests call busbw, for one GPU."""

    bytes_per_second: float = Field(1e10, gt=0, description="assumed: PCIe 3.0")
    latency_seconds: float = Field(2e-5, ge=0, description="assumed: of one message")


class Network(Section):
    """Between machines: busbw for a machine, each way, and what Ray's transfers share."""

    bytes_per_second: float = Field(3.125e9, gt=0, description="assumed: 25 Gbit/s")
    latency_seconds: float = Field(5e-5, ge=0, description="assumed: of one message")


class Input(Section):
    """Reading, decoding and cropping by Ray Data."""

    core_seconds_per_image: float = Field(
        0.0025, gt=0, description="measured: two cores of an AMD EPYC, 108 KB photos (tests/bench/results/input.json); packed 0.00144"
    )
    bytes_per_image: float = Field(108e3, gt=0, description="assumed: read from the storage, that benchmark's photos; with --data as the data set tells")
    share_from_other_nodes: float = Field(
        0.0, ge=0, le=1, description="assumed: of the crops, made on another GPU node: none where nodes carry labels and have cores; else up to 1"
    )
    storage_bytes_per_second: float = Field(25e9, gt=0, description="assumed: what the storage gives all machines together")


class DataNodes(Section):
    """Machines without GPUs, for all of the input, where the GPU nodes' cores do not do."""

    most: int = Field(0, ge=0, description="assumed: none")
    cores: int = Field(16, ge=1, description="assumed: of each")


class Checkpoint(Section):
    """How fast one is made."""

    copy_bytes_per_second: float = Field(
        3.4e9, gt=0, description="measured: 370 MB in 0.11 s, the copy a step waits for, from host memory (tests/bench/results/checkpoint.json); from a GPU assumed"
    )
    save_bytes_per_second: float = Field(7e7, gt=0, description="measured: 370 MB in 5.1 s, to an S3 server of the same machine; behind the steps' back")


class Restarts(Section):
    """Machines that go."""

    per_node_hour: float = Field(0.01, ge=0, description="assumed: of each GPU node; spot may be tenfold")
    seconds: float = Field(60.0, ge=0, description="assumed: until the workers train again; 17.6 measured with three nodes on two cores")


class Price(Section):
    """For an hour, in your currency."""

    gpu_node: float = Field(8.0, ge=0, description="made up: 1 for each of 8 GPUs")
    data_node: float = Field(1.0, ge=0, description="made up")
    head: float = Field(0.5, ge=0, description="made up")


class ClusterFacts(Section):
    """All of them. `ClusterFacts.read` for a file and overrides."""

    gpu: Gpu = Gpu()
    node: Node = Node()
    link: Link = Link()
    network: Network = Network()
    input: Input = Input()
    data_nodes: DataNodes = DataNodes()
    checkpoint: Checkpoint = Checkpoint()
    restarts: Restarts = Restarts()
    price: Price = Price()

    @classmethod
    def read(cls, path: str | Path | None, overrides: list[str] | tuple[str, ...] = ()) -> "ClusterFacts":
        """The defaults, with what a TOML file and then `section.key=value` overrides say. Raises UserError."""
        values: dict[str, Any] = {}
        source = "the command line"
        if path is not None:
            source = str(path)
            try:
                values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
            except OSError as error:
                raise UserError(f"--cluster {path}: {error.strerror}; infra/cluster_facts.toml is one to copy") from error
            except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
                raise UserError(f"--cluster {path} is not valid TOML: {error}") from error
        for override in overrides:
            apply_override(values, override, EXAMPLE)
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise UserError(f"{source}: {explain(error, fact_names() + list(cls.model_fields))}") from error

    def given(self) -> list[str]:
        """Names of those that a file or an override gave."""
        return [f"{s}.{k}" for s in type(self).model_fields for k in type(getattr(self, s)).model_fields if k in getattr(self, s).model_fields_set]

    def sources(self) -> dict[str, tuple[float, str]]:
        """`section.key`: its value and where that comes from, in order."""
        given, found = set(self.given()), {}
        for section in type(self).model_fields:
            table = getattr(self, section)
            for key, field in type(table).model_fields.items():
                name = f"{section}.{key}"
                found[name] = (getattr(table, key), "given" if name in given else field.description)
        return found


def fact_names() -> list[str]:
    """Every fact as `section.key`."""
    return [f"{s}.{k}" for s, f in ClusterFacts.model_fields.items() for k in f.annotation.model_fields]
