"""A Ray head that takes jobs: `ray start --head` with its dashboard, on this machine.

Not responsible for the jobs (test_submit.py) nor for other nodes (clusters.py).
"""

import json
import os
import sys
import urllib.request
from pathlib import Path

from tests.clusters import Cluster, free_port, wait_until


class JobHead(Cluster):
    """One node with its own ports and temporary folder; `url` is its dashboard. `variables` are those of the machine."""

    def __init__(self, cpus: int, variables: dict[str, str], token: str = ""):
        """`token`: it wants this one."""
        self._token = token
        self._dashboard_port = free_port()
        self.url = f"http://127.0.0.1:{self._dashboard_port}"
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # `python` and `moco-ray`, as on an image
        super().__init__(head_cpus=cpus, variables={"PATH": path, **variables, **({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if token else {})})
        wait_until(self._answers, 60, "the dashboard")

    def living(self) -> dict[str, str]:
        """As of any cluster; of one that wants a token, which this process has not, what its dashboard tells: that it is there."""
        if not self._token:
            return super().living()
        return {"head": "head"} if self._answers() else {}

    def _head_words(self) -> tuple[str, ...]:
        return ("--include-dashboard=True", f"--dashboard-port={self._dashboard_port}", "--dashboard-host=127.0.0.1")

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/api/version", timeout=2) as answer:
                return "ray_version" in json.load(answer)
        except OSError as error:
            return getattr(error, "code", 0) == 401  # it wants a token
