"""infra/aws and infra/gcp: by Ray's schema and loader, by the clouds' own descriptions of their calls, and EC2's by Ray's provider on moto. No cloud."""

import json
import re
import subprocess
from pathlib import Path

import boto3
import botocore.session
import botocore.validate
import googleapiclient.discovery_cache
import jsonschema
import pytest
import yaml
from moto import mock_aws
from ray.autoscaler._private.aws import config as aws_config
from ray.autoscaler._private.aws import utils as aws_utils
from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
from ray.autoscaler._private.util import prepare_config, validate_config

from tests.test_infra import ROOT, program, shellcheck

INFRA = ROOT / "infra"
CLOUDS = ("aws", "gcp")


def read(cloud: str) -> dict:
    return yaml.safe_load((INFRA / cloud / "cluster.yaml").read_text())


def prepared(config: dict) -> dict:
    """As `ray up` does before it asks the cloud."""
    jsonschema.validate(config, json.loads((Path(aws_config.__file__).parents[2] / "ray-schema.json").read_text()))
    found = prepare_config(config)
    validate_config(found)
    return found


def refuse_aws_node(node: dict) -> None:
    """By botocore's description of RunInstances; Ray chooses one of SubnetIds and adds the counts."""
    call = botocore.session.get_session().get_service_model("ec2").operation_model("RunInstances").input_shape
    words = {**{k: v for k, v in node.items() if k != "SubnetIds"}, "MinCount": 1, "MaxCount": 1}
    report = botocore.validate.ParamValidator().validate(words, call)
    assert not report.has_errors(), report.generate_report()


def refuse_gcp_node(node: dict) -> None:
    """By Google's description of compute.instances.insert, in which an unknown key is an error."""
    path = Path(googleapiclient.discovery_cache.__file__).parent / "documents" / "compute.v1.json"
    kinds = json.loads(path.read_text())["schemas"]

    def own(part):
        if isinstance(part, list):
            return [own(p) for p in part]
        if not isinstance(part, dict):
            return part
        found = {k: own(v) for k, v in part.items() if k not in ("id", "required", "annotations", "format", "default")}
        if "$ref" in part:
            return {"$ref": f"#/definitions/{part['$ref']}"}
        return {**found, "additionalProperties": False} if isinstance(part.get("properties"), dict) and part.get("type") == "object" else found

    definitions = {name: own(kind) for name, kind in kinds.items()}
    jsonschema.Draft7Validator({"$ref": "#/definitions/Instance", "definitions": definitions}).validate(node)


REFUSE = {"aws": refuse_aws_node, "gcp": refuse_gcp_node}


@pytest.mark.parametrize("cloud", CLOUDS)
def test_cluster_files_are_what_ray_and_the_cloud_accept(cloud):
    config = prepared(read(cloud))
    for node_type in config["available_node_types"].values():
        REFUSE[cloud](node_type["node_config"])


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_mistake_in_a_cluster_file_is_seen(cloud):
    with pytest.raises(jsonschema.ValidationError, match="idle_timeout_minute'"):
        prepared({**read(cloud), "idle_timeout_minute": 5})
    config = read(cloud)
    config["available_node_types"]["data"]["labells"] = {}
    with pytest.raises(jsonschema.ValidationError, match="labells"):
        prepared(config)
    config = read(cloud)
    config["head_node_type"] = "haed"
    with pytest.raises(ValueError, match="head_node_type"):
        prepared(config)
    spot = read(cloud)["available_node_types"]["gpu_spot"]["node_config"]
    inner = "InstanceMarketOptions" if cloud == "aws" else "scheduling"
    with pytest.raises((AssertionError, jsonschema.ValidationError), match="Spott"):
        REFUSE[cloud]({**spot, inner: {**spot[inner], "Spott": True}})


@pytest.mark.parametrize("cloud", CLOUDS)
def test_head_on_demand_workers_on_spot_from_none(cloud):
    config = prepared(read(cloud))
    head = config["available_node_types"][config["head_node_type"]]
    assert head["resources"]["CPU"] == 0 and "InstanceMarketOptions" not in head["node_config"] and "scheduling" not in head["node_config"]
    workers = {name: t for name, t in config["available_node_types"].items() if name != config["head_node_type"]}
    assert any("GPU" in t["resources"] for t in workers.values()) and any("GPU" not in t["resources"] for t in workers.values())
    for node_type in workers.values():
        node = node_type["node_config"]
        assert node_type["min_workers"] == 0
        assert node["InstanceMarketOptions"]["MarketType"] == "spot" if cloud == "aws" else node["scheduling"]["provisioningModel"] == "SPOT"
    start = "\n".join(config["head_start_ray_commands"])
    checks = "initial_delay_ms=1000", "period_ms=1000", "timeout_ms=2000", "failure_threshold=3"
    assert all(f"RAY_health_check_{check}" in start for check in checks)
    assert start.index("RAY_health_check") < start.index("RAY_JOB_STOP_WAIT_TIME_S=60") < start.index("ray start --head")
    assert f"drain_on_notice.py --cloud {cloud}" in config["worker_start_ray_commands"][-1]
    assert "drain_on_notice" not in start, "the head is not drained"


@pytest.mark.parametrize("cloud", CLOUDS)
def test_commands_of_the_cluster_files_pass_shellcheck(cloud):
    commands = [c for name, lines in read(cloud).items() if name.endswith("_commands") for c in lines]
    assert len(commands) >= 6
    given = "RAY_HEAD_IP=10.0.0.1\n"  # by Ray
    assert shellcheck("-s", "bash", "--exclude=SC2086,SC2088", "-", text=given + "\n".join(commands) + "\n") == ""


@pytest.fixture
def account(monkeypatch, tmp_path):
    """An AWS account in this process, with what roles.yaml makes in a real one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    with mock_aws():
        for cache in (aws_utils.resource_cache, aws_utils.client_cache):
            cache.cache_clear()
        ec2 = boto3.client("ec2", "us-east-1")
        vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
        subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.0.0/24", AvailabilityZone="us-east-1a")["Subnet"]["SubnetId"]
        ec2.modify_subnet_attribute(SubnetId=subnet, MapPublicIpOnLaunch={"Value": True})
        group = ec2.create_security_group(GroupName="nodes", Description="nodes", VpcId=vpc)["GroupId"]
        iam = boto3.client("iam", "us-east-1")
        for name in ("moco-ray-head", "moco-ray-worker"):
            iam.create_instance_profile(InstanceProfileName=name)
        yield ec2, subnet, group, ec2.describe_images()["Images"][0]["ImageId"]
    for cache in (aws_utils.resource_cache, aws_utils.client_cache):
        cache.cache_clear()


def test_rays_ec2_provider_launches_each_kind_of_node(account):
    ec2, subnet, group, image = account
    text = (INFRA / "aws" / "cluster.yaml").read_text().replace("subnet-REPLACE", subnet).replace("sg-REPLACE", group)
    config = prepared(yaml.safe_load(re.sub(r"resolve:ssm:\S+", image, text)))  # which moto cannot look up
    config = aws_config.bootstrap_aws(config)
    provider = AWSNodeProvider(config["provider"], config["cluster_name"])
    for name, node_type in config["available_node_types"].items():
        provider.create_node(node_type["node_config"], {"ray-node-name": name}, 1)
    found = [i for r in ec2.describe_instances()["Reservations"] for i in r["Instances"]]
    told = {next(t["Value"] for t in i["Tags"] if t["Key"] == "Name"): i for i in found}
    assert {n: (i["InstanceType"], i.get("InstanceLifecycle"), i["IamInstanceProfile"]["Arn"].rpartition("/")[2]) for n, i in told.items()} == {
        "head": ("m7i.xlarge", None, "moco-ray-head"), "gpu_spot": ("g6.2xlarge", "spot", "moco-ray-worker"),
        "data": ("c7i.4xlarge", "spot", "moco-ray-worker"), "gpu_efa": ("g6.48xlarge", "spot", "moco-ray-worker"),
    }  # fmt: skip
    assert {i["SubnetId"] for i in found} == {subnet} and {g["GroupId"] for i in found for g in i["SecurityGroups"]} == {group}
    assert {t["Value"] for i in found for t in i["Tags"] if t["Key"] == "ray-cluster-name"} == {"moco-ray"}


ROLES = INFRA / "aws" / "roles.yaml"


def cfn_lint(path: Path) -> str:
    return subprocess.run([program("cfn-lint"), path], capture_output=True, text=True).stdout


def test_roles_pass_cfn_lint_and_a_mistake_in_them_is_seen(tmp_path):
    assert cfn_lint(ROLES) == ""
    wrong = tmp_path / "roles.yaml"
    wrong.write_text(ROLES.read_text().replace("SecurityGroupIngress:\n", "SecurityGroupIngres:\n", 1))
    assert "SecurityGroupIngres" in cfn_lint(wrong)


def test_roles_name_what_they_allow():
    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("!", lambda loader, tag, node: node.value)
    resources = yaml.load(ROLES.read_text(), Loader=Loader)["Resources"]
    statements = [s for r in resources.values() if r["Type"] == "AWS::IAM::ManagedPolicy" for s in r["Properties"]["PolicyDocument"]["Statement"]]
    for statement in statements:
        actions = statement["Action"] if isinstance(statement["Action"], list) else [statement["Action"]]
        assert not any("*" in action for action in actions)
        assert statement["Resource"] != "*" or all(a.startswith("ec2:Describe") for a in actions), "what cannot be narrower"
    worker, = resources["Worker"]["Properties"]["ManagedPolicyArns"]
    assert worker == "Storage", "workers read and write, and launch nothing"


def test_no_account_and_no_secret_is_in_the_files():
    texts = {p.relative_to(ROOT): p.read_text() for p in INFRA.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    for path, text in texts.items():
        assert not re.search(r"\b\d{12}\b|AKIA[0-9A-Z]{16}|BEGIN [A-Z ]*PRIVATE KEY|aws_secret_access_key\s*[=:]\s*\S", text), path
        hosts = set(re.findall(r"[\w.-]+\.[a-z]{2,}(?=/moco_ray)", text))
        assert hosts <= {"registry.example.com"}, f"{path} names a registry"


