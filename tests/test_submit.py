"""Jobs on a real head: submitted, followed, stopped, submitted again, finished, exported, with nothing but its address.

One head for all of it, for each job costs ten seconds and a training twenty. Data and storage are in S3.
"""

import http.server
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.job_submission import JobDetails

import moco_ray
from moco_ray import checkpoint, cli
from moco_ray.cli_submit import order_of, variables
from moco_ray.data.prototypes import drawn_prototypes
from moco_ray.data.storage import Store
from moco_ray.errors import UserError
from moco_ray.grafana import dashboard
from moco_ray.submit import STOP_SECONDS, entrypoint, environment, follow
from tests.clusters import wait_until
from tests.heads import JobHead
from tests.test_gauges import expressions
from tests.test_infra_rules import RULES, named

ROOT = Path(__file__).parent.parent
STEPS = 150
SMALL = [
    "contrast.queue_keys=256", "batch.global_batch_size=32", "batch.bn_group_size=8", f"schedule.steps={STEPS}", "schedule.warmup_steps=5", "run.log_every_steps=1",
    "run.checkpoint_every_steps=1000", "augment.image_pixels=24", "evaluation.every_epochs=0", "evaluation.bank_uri=", "evaluation.query_uri=",
]  # fmt: skip


# --- what is refused before anything is sent ----------------------------------------------------------------------------


def order(*words: str, **more: str):
    return order_of(list(words), cli._parsed, more)


@pytest.mark.parametrize(
    "words, told",
    [
        (["jobs/demo.toml", "--data", "s3://a/b", "--storage", "runs"], "--storage is runs, a path of this machine"),
        (["jobs/demo.toml", "--data", "s3://a/b"], "--storage is not given, and its default, runs, is a folder"),
        (["doctor", "jobs/demo.toml", "--data", "s3://a/b"], "--storage is not given, and its default, runs, is a folder"),
        (["jobs/demo.toml", "--storage", "s3://a/b"], "data.uri is data/fashion-mnist/train, a path of this machine"),
        (["jobs/demo.toml", "--data", "s3://a/b", "--storage", "s3://c", "evaluation.query_uri=here/x"], "bank_uri is data/fashion-mnist/train, a path"),
        (["jobs/demo.toml", "--data", "s3://a/b", "--storage", "s3://c", "contrast.queue_key=1"], "queue_keys"),
        (["jobs/nothing.toml", "--data", "s3://a/b", "--storage", "s3://c"], "nothing.toml"),
        (["evaluate", "runs/first"], "RUN is runs/first, a path of this machine"),
        (["export", "s3://a/b", "--to", "timm"], "--output"),
        (["watch", "s3://a/b"], "runs on any machine"),
        (["nothing.sh"], "nothing.sh is not a file"),
        (["jobs/demo.toml", "--data", "s3://a/b", "--storage", "s3://c", "--workers", "2:1"], "--workers 2:1"),
    ],
)
def test_what_can_only_fail_on_the_cluster_is_refused_here(words, told, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=re.escape(told)):
        order(*words)


SCRIPTS = {"end_to_end.sh": ["RECIPE", "IMAGES", "STORAGE", "NAME"], "detection.sh": ["BACKBONE", "IMAGES", "ANNOTATIONS", "OUTPUT"]}


@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize("script, names", SCRIPTS.items())
def test_a_script_names_the_variable_that_it_lacks_and_leaves_with_2(script, names, shell):
    for lacking in names:
        told = subprocess.run(
            [shell, ROOT / "jobs" / script], env={"PATH": os.environ["PATH"], "MOCO_RAY": "false", **{name: "x" for name in names if name != lacking}},
            capture_output=True, text=True,
        )  # fmt: skip
        assert told.returncode == 2 and f"{lacking}: is not set" in told.stderr and len(told.stderr.splitlines()) == 1, told


def test_bank_and_queries_of_the_long_script_go_together():
    given = {"PATH": os.environ["PATH"], "MOCO_RAY": "false", **dict.fromkeys(SCRIPTS["end_to_end.sh"], "x")}
    for one, other in (("BANK", "QUERIES"), ("QUERIES", "BANK")):
        told = subprocess.run(["bash", ROOT / "jobs" / "end_to_end.sh"], env={**given, one: "x"}, capture_output=True, text=True)
        assert told.returncode == 2 and f"{other}: goes with {one}" in told.stderr, told


LONG = {"RECIPE": "jobs/moco_v2_imagenet.toml", "IMAGES": "s3://a/b", "STORAGE": "/shared/work", "NAME": "first"}
BOXES = {"BACKBONE": "s3://a/b", "IMAGES": "/shared/a", "ANNOTATIONS": "/shared/b.json", "OUTPUT": "s3://a/c"}


@pytest.mark.parametrize(
    "words, given, told",
    [
        (["jobs/end_to_end.sh"], {"IMAGES": "s3://a", "NAME": ""}, "jobs/end_to_end.sh needs RECIPE, STORAGE, NAME; give --env RECIPE=.. --env STORAGE=.. --env NAME=.."),
        (["jobs/end_to_end.sh"], {}, "needs RECIPE, IMAGES, STORAGE, NAME"),
        (["jobs/end_to_end.sh"], LONG | {"RECIPE": "moco_v2.toml"}, "--env RECIPE=moco_v2.toml: no such file is here"),
        (["jobs/end_to_end.sh", "contrast.queue_key=5"], LONG, "queue_keys"),
        (["jobs/end_to_end.sh"], LONG | {"RECIPE": "jobs/demo.toml"}, "evaluation.bank_uri of jobs/demo.toml is data/fashion-mnist/train, a path of this machine"),
        (["jobs/end_to_end.sh"], LONG | {"STORAGE": "runs"}, "--env STORAGE is runs, a path of this machine"),
        (["jobs/end_to_end.sh"], LONG | {"QUERIES": "../x"}, "--env QUERIES is ../x, a path of this machine"),
        (["jobs/detection.sh"], BOXES | {"OUTPUT": ""}, "jobs/detection.sh needs OUTPUT"),
        (["jobs/detection.sh"], BOXES | {"ANNOTATIONS": "train.json"}, "--env ANNOTATIONS is train.json, a path"),
    ],
)
def test_what_a_script_lacks_and_what_its_variables_cannot_mean_on_the_cluster_is_refused_here(words, given, told, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=re.escape(told)):
        order(*words, **given)


def test_a_script_s_recipe_goes_along_and_only_what_it_always_needs_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    script, recipe = ROOT / "jobs" / "end_to_end.sh", ROOT / "jobs" / "moco_v2_imagenet.toml"
    alike = [order(str(script), **LONG), order(str(script), str(recipe), **LONG | {"RECIPE": recipe.name}), order(str(script), **LONG | {"RECIPE": str(recipe)})]
    for sent in alike:  # of the repository; a word, as its name in the job's folder; a whole path
        assert sent.files == [script, recipe] and sent.variables == LONG | {"RECIPE": recipe.name}
    elsewhere = LONG | {"RECIPE": "/shared/there.toml"}
    assert order(str(script), **elsewhere).variables == elsewhere
    assert order(str(ROOT / "jobs" / "detection.sh"), **BOXES).variables == BOXES
    (tmp_path / "mine.sh").write_text('if [ "$1" ]; then\n  : "${ONE:?}"\nfi\nTWO=2\n: "${TWO:?}"\necho "${THREE:?}"\n')
    assert order("mine.sh", STORAGE="here", RECIPE="mine").variables == {"STORAGE": "here", "RECIPE": "mine"}  # it names neither


def test_recipe_and_scripts_go_along_by_name_and_the_run_is_written_on_the_job(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    recipe = str(ROOT / "jobs" / "demo.toml")
    sent = order(recipe, "--data", "s3://a/b", "--storage", "s3://c/runs/", *SMALL, WORD="1")
    assert sent.words[:2] == ["pretrain", "demo.toml"] and sent.files == [Path(recipe)] and sent.name == "demo"
    assert sent.facts["run"] == "s3://c/runs/demo" and sent.facts["recipe"] == "demo.toml" and sent.facts["recipe_fingerprint"]
    assert all(isinstance(value, str) for value in sent.facts.values())
    assert entrypoint(sent.words) == "exec python -m moco_ray pretrain demo.toml --data s3://a/b --storage s3://c/runs/ " + " ".join(SMALL)
    brought, installed = environment(sent, tmp_path, False), environment(sent, tmp_path, True)
    assert brought["py_modules"] == [str(Path(moco_ray.__file__).parent)] and "py_modules" not in installed
    assert brought["env_vars"]["WORD"] == "1" and brought["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"] == str(STOP_SECONDS)
    (tmp_path / "mine.sh").write_text("true\n")
    script = order("mine.sh", recipe, "s3://a/b", recipe)
    assert entrypoint(script.words) == "exec bash mine.sh demo.toml s3://a/b demo.toml" and script.files == [Path("mine.sh"), Path(recipe)]


def test_options_of_submit_may_stand_anywhere_and_the_words_stay_in_order(monkeypatch):
    heard = {}
    monkeypatch.setattr("moco_ray.cli_submit.order_of", lambda words, *_: heard.update(words=words))
    monkeypatch.setitem(sys.modules, "moco_ray.submit", SimpleNamespace(submit=lambda *words: heard.update(asked=words) or 7))
    monkeypatch.setenv("HERE", "x")
    code = cli.main(["submit", "a.toml", "--data", "s3://a", "--address", "http://h:1", "--workers", "2", "x.y=1", "--no-wait", "--env", "HERE", "--job-id", "j"])
    assert code == 7 and heard["words"] == ["a.toml", "--data", "s3://a", "--workers", "2", "x.y=1"]
    assert heard["asked"][0] == "http://h:1" and heard["asked"][2:] == ("j", False, False)
    cli.main(["submit", "--address", "http://h:1", "--use-image", "evaluate", "s3://r", "--protocol", "linear"])
    assert heard["words"] == ["evaluate", "s3://r", "--protocol", "linear"] and heard["asked"][3:] == (True, True)
    assert variables(["HERE", "A=b=c"], 5) == {"HERE": "x", "A": "b=c", "RAY_JOB_STOP_WAIT_TIME_S": "5"}
    with pytest.raises(UserError, match="no such variable"):
        variables(["NOWHERE_TO_BE_FOUND"], None)


def test_without_an_address_or_with_one_where_nothing_is_the_cure_is_told(monkeypatch, capsys):
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["submit", "pack", "s3://a", "s3://b"]) == 2 and "give --address" in capsys.readouterr().err
    assert cli.main(["submit", "--address", "http://127.0.0.1:1", "pack", "s3://a", "s3://b"]) == 2
    assert "nothing answers at http://127.0.0.1:1" in capsys.readouterr().err
    assert cli.main(["submit", "--address", "ray://127.0.0.1:1", "pack", "s3://a", "s3://b"]) == 2
    assert "dashboard" in capsys.readouterr().err


def test_what_answers_but_is_no_job_server_is_told(capsys):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)  # 501 to everything
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert cli.main(["submit", "--address", f"http://127.0.0.1:{server.server_port}", "pack", "s3://a", "s3://b"]) == 2
    finally:
        server.shutdown()
        server.server_close()
    assert "is no Ray job server" in capsys.readouterr().err


class Client:
    """Of a job whose log breaks off in the middle of a word, once; then the head is back."""

    def __init__(self, statuses, code: int | None = None, said: str = ""):
        self.statuses, self.breaks, self.code, self.said = statuses, 1, code, said

    def get_job_info(self, _):
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        return JobDetails(type="SUBMISSION", status=status, entrypoint="", message="it waits", driver_exit_code=self.code)

    def get_job_logs(self, _):
        return self.said

    async def tail_job_logs(self, _):
        yield "one\nt"
        if self.breaks:
            self.breaks -= 1
            raise RuntimeError("cut")
        yield "wo\nthree\n"


async def at_once(_):
    pass


def test_a_log_that_breaks_off_is_taken_up_where_it_was_and_a_head_that_stays_away_is_told(monkeypatch, capsys):
    monkeypatch.setattr("moco_ray.submit.asyncio.sleep", at_once)
    assert follow(Client(["PENDING", "RUNNING", "RUNNING", "SUCCEEDED"]), "http://h", "j") == 0
    assert capsys.readouterr().out == "one\ntwo\nthree\n"
    monkeypatch.setattr("moco_ray.submit.RECONNECT_SECONDS", -1.0)
    with pytest.raises(UserError, match="does not answer .cut.; the job j may go on"):
        follow(Client(["RUNNING"]), "http://h", "j")


@pytest.mark.parametrize(
    "status, code, said, left, told",
    [
        ("STOPPED", None, "", 143, "was stopped"),
        ("FAILED", 2, "moco-ray: error: a mistake", 2, "its command left with code 2"),
        ("FAILED", 1, "ModuleNotFoundError: No module named 'torch'\nx", 1, "needs what moco_ray needs"),
        ("FAILED", None, "", 1, "it waits"),  # it never began: Ray's message
    ],
)
def test_how_a_job_ended_is_its_exit_code_and_a_line(status, code, said, left, told, capsys):
    client = Client([status], code, said)
    client.breaks = 0
    assert follow(client, "http://h", "j") == left and told in capsys.readouterr().err


# --- on a head ----------------------------------------------------------------------------------------------------------


class Desk:
    """A person at another machine: a folder with nothing in it, the address of the head, and the keys of the storage."""

    def __init__(self, folder: Path, head: JobHead, variables: dict[str, str]):
        self.folder, self.head = folder, head
        self.variables = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")} | variables

    def start(self, *words: str, program: tuple[str, ...] = ("-m", "moco_ray", "submit")) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, *program, *words], cwd=self.folder, env=self.variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def run(self, *words: str) -> tuple[int, str]:
        """`moco-ray submit`: exit code and words."""
        return self._end(self.start(*words, "--address", self.head.url))

    def ray(self, *words: str) -> tuple[int, str]:
        """`ray job`: exit code and words."""
        return self._end(self.start("job", words[0], "--address", self.head.url, *words[1:], program=("-m", "ray.scripts.scripts")))

    @staticmethod
    def _end(process: subprocess.Popen) -> tuple[int, str]:
        out, _ = process.communicate(timeout=240)
        return process.returncode, out


@pytest.fixture(scope="module")
def place(moto, tmp_path_factory):
    """A head with the storage's keys, as a role would give them; images in S3; and somebody who knows the address."""
    folder = tmp_path_factory.mktemp("jobs")
    drawn_prototypes(folder / "drawn", rows=320, test_rows=40)
    moto.create_bucket("images", {str(p.relative_to(folder / "drawn")): p.read_bytes() for p in (folder / "drawn").rglob("*.parquet")})
    moto.create_bucket("runs")
    before = {name: os.environ.get(name) for name in moto.environment()}
    os.environ.update(moto.environment())  # this process reads the storage
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    try:
        with JobHead(4, moto.environment()) as head:
            yield Desk(elsewhere, head, {"RAY_AUTH_MODE": "disabled"})
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


DEMO = [str(ROOT / "jobs" / "demo.toml"), "--data", "s3://images/train", "--storage", "s3://runs", *SMALL]


def steps_of(run: Store) -> list[int]:
    """Those of metrics.jsonl as it is in the storage, without evaluations."""
    entries = map(json.loads, run.read("metrics.jsonl").decode().splitlines())
    return [entry["step"] for entry in entries if "loss" in entry]


@pytest.fixture(scope="module")
def story(place):
    """Submitted, stopped in mid-run, submitted again by Ray's own command, finished."""
    run, told = Store("s3://runs/demo"), SimpleNamespace()
    process = place.start(*DEMO, "--workers", "2", "--job-id", "first", "--address", place.head.url)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "/150 · loss" in line:
            break
    told.status = place.ray("status", "first")
    began = time.monotonic()
    told.stop = place.ray("stop", "first")
    told.words = "".join(lines) + process.communicate(timeout=90)[0]
    told.stop_seconds, told.code = time.monotonic() - began, process.returncode
    told.stopped_at, told.saved_at = max(steps_of(run)), checkpoint.newest(run).step
    told.listed = json.loads(urllib.request.urlopen(f"{place.head.url}/api/jobs/first").read())
    words = [word for word in DEMO if word != DEMO[0]]
    told.again = place.ray(
        "submit", "--submission-id", "second", "--working-dir", str(ROOT), "--", "python", "-m", "moco_ray", "pretrain", "jobs/demo.toml", *words, "--workers", "2"
    )  # fmt: skip
    told.run = run
    return told


def test_a_job_is_followed_and_its_log_has_lines_and_no_bar(story):
    assert "job first at http" in story.words and "ray job stop first" in story.words
    assert re.search(r"epoch .* step \d+/150 · loss", story.words) and "\r" not in story.words and "Traceback" not in story.words
    assert story.status[0] == 0 and "RUNNING" in story.status[1]


def test_a_stopped_job_leaves_a_checkpoint_of_its_last_step_and_says_so(story):
    assert story.stop[0] == 0 and "was stopped" in story.stop[1], story.stop
    assert story.code == 143 and "stopped at step" in story.words, story.words
    assert 3 <= story.saved_at == story.stopped_at < STEPS  # none is due before step 1000
    print(f"from `ray job stop` to the end of the job: {story.stop_seconds:.1f} s")


def test_the_job_carries_the_name_of_its_recipe_and_run(story):
    facts = story.listed["metadata"]
    assert facts["recipe"] == "demo.toml" and facts["run"] == "s3://runs/demo" and facts["command"] == "pretrain"
    assert story.listed["status"] == "STOPPED"


def test_ray_s_own_command_submits_it_again_and_it_goes_on_to_the_end(story):
    code, words = story.again
    assert code == 0 and f"its newest checkpoint is of step {story.saved_at}" in words and "succeeded" in words, words
    assert steps_of(story.run) == list(range(1, STEPS + 1))
    assert json.loads(story.run.read("lease.json"))["job"] == "second"
    first = json.loads(story.run.read("run.json"))
    assert first["versions"]["moco_ray"] and len(first["git_commit"]) == 40  # the package was brought, without a checkout


def test_the_backbone_is_exported_by_a_job_and_loads_elsewhere(story, place):
    code, words = place.run("export", "s3://runs/demo", "--to", "safetensors", "--output", "s3://runs/backbone.safetensors")
    assert code == 0, words
    assert moco_ray.load_backbone("s3://runs/backbone.safetensors").features == 512


def test_a_job_that_fails_tells_why_and_leaves_with_its_code(place, story, tmp_path):
    code, words = place.run("pack", "s3://images/train", "s3://runs/packed", "--job-id", "first")
    assert code == 2 and "has had a job first already" in words, words
    keys = ["--env", "AWS_ACCESS_KEY_ID=nobody", "--env", "AWS_SECRET_ACCESS_KEY=nothing"]
    code, words = place.run("pack", "s3://images/train", "s3://runs/packed", *keys)
    assert code == 2 and "s3://images" in words and "AWS_ACCESS_KEY_ID" in words and "Traceback" not in words, words
    (tmp_path / "sitecustomize.py").write_text(NO_PACKAGE)
    code, words = place.run("show-plan", "jobs/demo.toml", "--use-image", "--env", f"PYTHONPATH={tmp_path}")
    assert code == 1 and "the cluster's image has no moco_ray" in words, words


@pytest.mark.slow
def test_from_images_to_a_backbone_in_one_job_and_once_more(place):
    recipe, script = str(ROOT / "jobs" / "demo.toml"), str(ROOT / "jobs" / "end_to_end.sh")
    given = {"RECIPE": "demo.toml", "IMAGES": "s3://images/train", "STORAGE": "s3://runs/all", "NAME": "mine", "BANK": "s3://images/train", "QUERIES": "s3://images/test"}
    words = [word for name, value in given.items() for word in ("--env", f"{name}={value}")] + [script, recipe, *SMALL, "schedule.steps=30"]
    code, said = place.run(*words)
    assert code == 0 and "trained encoder" in said, said
    names = {entry.name for entry in Store("s3://runs/all").list()}
    assert {"packed/mine/_moco_ray/pack.json", "runs/mine/evaluation.json", "backbones/mine.safetensors"} <= names
    assert moco_ray.load_backbone("s3://runs/all/backbones/mine.safetensors").origin["step"] == 30
    code, said = place.run(*words)
    assert code == 0 and "it is finished: nothing to do" in said and "is there already, the same" in said, said


NOT_HERE = {  # Ray exports them where such a thing is or happened
    "ray_node_gpus_utilization": "a GPU",
    "autoscaler_recently_failed_nodes": "an autoscaler",
    "ray_memory_manager_worker_eviction_total": "a node out of memory",
}


@pytest.mark.slow
def test_every_metric_of_the_dashboard_and_the_rules_is_exported_by_a_real_run(tmp_path):
    drawn_prototypes(tmp_path / "drawn", rows=320, test_rows=40)
    queries = [rule["expr"] for rule in RULES] + [query for query in expressions(dashboard()) if not query.startswith("label_values")]
    wanted, seen = set().union(*map(named, queries)) - NOT_HERE.keys(), set()
    judged = ["evaluation.every_epochs=10", f"evaluation.bank_uri={tmp_path}/drawn/train", f"evaluation.query_uri={tmp_path}/drawn/test"]
    with JobHead(4, {"RAY_metrics_report_interval_ms": "1000"}) as head:
        desk = Desk(tmp_path, head, {"RAY_AUTH_MODE": "disabled"})
        places = ["--data", f"{tmp_path}/drawn/train", "--storage", f"{tmp_path}/runs", "--address", head.url]
        process = desk.start(DEMO[0], *places, *SMALL, *judged, "schedule.steps=3000", "run.checkpoint_every_steps=100")

        def all_there() -> bool:
            for target in json.loads((head.folder / "ray" / "prom_metrics_service_discovery.json").read_text()):
                for port in target["targets"]:
                    with urllib.request.urlopen(f"http://{port}/metrics", timeout=10) as answer:
                        seen.update(re.findall(r"^([a-zA-Z_:][\w:]*)[ {]", answer.read().decode(), re.M))
            return wanted <= seen or process.poll() is not None

        try:
            wait_until(all_there, 150, "all metrics")
        finally:
            process.kill()
            words, _ = process.communicate()
            assert wanted <= seen, (wanted - seen, words)


NO_PACKAGE = """
import sys
class Blind:
    def find_spec(self, name, *_):
        if name == "moco_ray":
            raise ModuleNotFoundError("No module named moco_ray", name=name)
sys.meta_path.insert(0, Blind())
"""


def test_a_head_that_wants_a_token_is_told_from_one_that_does_not(tmp_path, moto):
    with JobHead(1, moto.environment(), token="a" * 64) as head:
        desk = Desk(tmp_path, head, {"RAY_AUTH_MODE": "disabled"})
        code, words = desk.run("show-plan", str(ROOT / "jobs" / "demo.toml"))
        assert code == 2 and "wants a token" in words and "RAY_AUTH_TOKEN" in words, words
        desk = Desk(tmp_path, head, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "b" * 64})
        code, words = desk.run("show-plan", str(ROOT / "jobs" / "demo.toml"))
        assert code == 2 and "token" in words, words
        desk = Desk(tmp_path, head, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64})
        code, words = desk.run("show-plan", str(ROOT / "jobs" / "demo.toml"), "data.uri=s3://images/train")
        assert code == 0 and "warning" in words, words
