"""infra/drain_on_notice.py, the agent of spot nodes: against a metadata service and a `ray` of the test's own. No cloud, no Ray."""

import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from ray.scripts.scripts import drain_node

INFRA = Path(__file__).parent.parent / "infra"


@pytest.fixture
def node(tmp_path):
    """(environment, folder of processes, file of what `ray` was asked)."""
    process = tmp_path / "processes" / "41"
    process.mkdir(parents=True)
    words = ["/site-packages/ray/core/src/ray/raylet/raylet", "--node_id=abcdef", "--gcs-address=10.0.0.1:6379", "--store_socket_name=x"]
    (process / "cmdline").write_bytes("\0".join(words).encode())
    asked = tmp_path / "asked"
    ray = tmp_path / "bin" / "ray"
    ray.parent.mkdir()
    ray.write_text(f'#!/bin/sh\necho "$@" >> {asked}\nrm -rf {process}\n')
    ray.chmod(0o755)
    return {**os.environ, "PATH": f"{ray.parent}:{os.environ['PATH']}"}, process.parent, asked


def agent(node, *words: str) -> subprocess.CompletedProcess:
    variables, processes, _ = node
    command = [sys.executable, INFRA / "drain_on_notice.py", *words, "--processes", processes]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=30)


class Metadata(http.server.BaseHTTPRequestHandler):
    """Both clouds': a notice at the second look; AWS's only with its token."""

    looks = 0

    def do_PUT(self):
        self.answer("secret" if self.headers["X-aws-ec2-metadata-token-ttl-seconds"] else None)

    def do_GET(self):
        type(self).looks += 1
        aws = self.headers["X-aws-ec2-metadata-token"] == "secret" and self.path == "/latest/meta-data/spot/instance-action"
        gcp = self.headers["Metadata-Flavor"] == "Google" and self.path == "/computeMetadata/v1/instance/preempted"
        if self.looks < 2:
            self.answer("FALSE" if gcp else None)
        else:
            self.answer('{"action": "terminate", "time": "2999-01-01T00:00:00Z"}' if aws else "TRUE" if gcp else None)

    def answer(self, body: str | None):
        self.send_response(200 if body else 404)
        self.end_headers()
        self.wfile.write((body or "").encode())

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_the_agent_drains_its_node_at_the_clouds_notice(node, cloud):
    Metadata.looks = 0
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        done = agent(node, "--cloud", cloud, "--metadata", f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 0 and Metadata.looks == 2, done.stderr
    asked = node[2].read_text()
    assert set(re.findall(r"--[a-z-]+", asked)) <= {word for option in drain_node.params for word in option.opts}, "Ray's own options"
    assert asked.startswith(f"drain-node --address 10.0.0.1:6379 --node-id abcdef --reason DRAIN_NODE_REASON_PREEMPTION --reason-message spot notice of {cloud} --deadline-remaining-seconds ")
    left = int(asked.split()[-1])
    assert 20 <= left <= 25 if cloud == "gcp" else left > 1e9


def test_a_pods_hook_drains_at_once_and_waits_for_the_raylets_end(node):
    done = agent(node, "--now", "--seconds", "20")
    assert done.returncode == 0 and node[2].read_text().split()[-1] == "20", done.stderr


def test_the_agent_says_so_where_no_ray_runs(node):
    shutil.rmtree(node[1] / "41")
    done = agent(node, "--now", "--seconds", "1")
    assert done.returncode == 1 and "no raylet runs here" in done.stderr
