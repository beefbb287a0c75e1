"""`moco-ray submit`: one of our commands as a Ray job, from any machine that reaches the cluster's dashboard.

Responsible for what goes along (recipe, package, environment), for what is refused before anything is sent, and for following the
job's log. Not responsible for the words of the command line (cli_submit.py) nor for what the command does on the cluster.
"""

import asyncio
import logging
import os
import shlex
import shutil
import socket
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp
from ray.job_submission import JobInfo, JobStatus, JobSubmissionClient

from moco_ray import source
from moco_ray.errors import UserError
from moco_ray.words import note

STOP_SECONDS = 60  # between `ray job stop` and the end of the driver: for a last checkpoint
CONNECT_SECONDS = 10.0
RECONNECT_SECONDS = 120.0  # that a head which does not answer is tried for, while a log is followed
QUIET_SECONDS = 15.0  # that a job may take to start before it is said what it waits for
ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
SCRIPT = ".sh"
UPLOADED = (".toml", SCRIPT)  # files of this machine that go along


class Order(NamedTuple):
    """What is to run on the cluster."""

    words: list[str]  # of moco-ray, or a shell script of this machine and its words
    name: str  # of the run, or of the command
    files: list[Path]  # of this machine, that lie in the job's working directory under their own names
    facts: dict[str, str]  # kept with the job
    variables: dict[str, str]  # its environment, and that of all its tasks


def submit(address: str, order: Order, identity: str = "", use_image: bool = False, wait: bool = True) -> int:
    """Submit it; with `wait` follow its log to the end. Returns an exit code: 0, that of the job's command, or 143 if it was stopped.

    Raises UserError where the cluster cannot be reached or refuses the job.
    """
    client = connect(address)
    identity = identity or f"{order.name}-{datetime.now():%Y%m%d-%H%M%S}"
    with tempfile.TemporaryDirectory(prefix="moco-ray-job-") as folder:
        for file in order.files:
            shutil.copy(file, folder)
        try:
            client.submit_job(
                entrypoint=entrypoint(order.words), submission_id=identity, metadata=order.facts, runtime_env=environment(order, Path(folder), use_image)
            )  # no resources are asked for the driver: then Ray runs it on the head
        except Exception as error:
            if "already exists" in str(error):
                raise UserError(f"{address} has had a job {identity} already; give another --job-id, or none") from error
            raise UserError(f"{address} refuses the job {identity}: {_last_line(error)}") from error
    note(f"job {identity} at {address}")
    note(f"follow it:  ray job logs --follow {identity} --address {address}")
    note(f"stop it:    ray job stop {identity} --address {address}")
    return follow(client, address, identity) if wait else 0


def connect(address: str) -> JobSubmissionClient:
    """A client of the job server at http://HOST:PORT. Raises UserError where there is none, or where it wants a token."""
    for name in ADDRESS_VARIABLES:  # Ray would prefer them to what it is told
        os.environ.pop(name, None)
    for name in ("ray.dashboard.modules.job.sdk", "ray.dashboard.modules.dashboard_sdk"):  # they set a level of their own
        logging.getLogger(name).setLevel(logging.ERROR)
    parts = urlsplit(address if "://" in address else f"http://{address}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"--address {address}: give the address of the cluster's dashboard, http://HEAD:8265")
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname, port), timeout=CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise UserError(
            f"nothing answers at {address} ({error}); give the address of the cluster's dashboard, http://HEAD:8265, and see that this "
            "machine reaches it (a tunnel: `ray dashboard CLUSTER.yaml`, `kubectl port-forward service/HEAD 8265`)"
        ) from error
    try:
        return JobSubmissionClient(f"{parts.scheme}://{parts.netloc}")
    except Exception as error:
        text = str(error)
        if "uthentication" in text:
            raise UserError(
                f"the cluster at {address} wants a token ({text.strip().splitlines()[0]}); set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or "
                "RAY_AUTH_TOKEN_PATH as on the cluster"
            ) from error
        raise UserError(
            f"what answers at {address} is no Ray job server ({_last_line(error)}); give the dashboard's address, http://HEAD:8265, of a "
            "cluster with ray[default] installed"
        ) from error


def entrypoint(words: list[str]) -> str:
    """The job's shell command. It replaces its shell, so that SIGTERM finds the driver."""
    if words[0].endswith(SCRIPT):
        return "exec " + shlex.join(["bash", *words])
    return "exec " + shlex.join(["python", "-m", "moco_ray", *words])


def environment(order: Order, folder: Path, use_image: bool) -> dict[str, object]:
    """Ray's runtime_env: the files, our package unless the image's is to be used, and variables."""
    variables = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS), "MOCO_RAY": "python -m moco_ray", **order.variables}
    if use_image:
        return {"working_dir": str(folder), "env_vars": variables}
    return {
        "working_dir": str(folder),
        "py_modules": [str(source.PACKAGE)],
        "excludes": ["__pycache__"],
        "env_vars": {**source.as_variables(), **variables},
    }


def follow(client: JobSubmissionClient, address: str, identity: str) -> int:
    """Print the job's log until it ends; returns the exit code as `submit` does. Ctrl-C leaves the job alone."""
    try:
        info = asyncio.run(_follow(client, address, identity))
    except KeyboardInterrupt:
        note(f"\nmoco-ray: the job {identity} goes on; stop it with `ray job stop {identity} --address {address}`")
        return 130
    if info.status == JobStatus.SUCCEEDED:
        return 0
    if info.status == JobStatus.STOPPED:
        note(f"moco-ray: the job {identity} was stopped; the same command submits it again and goes on from the newest checkpoint")
        return 143
    said = client.get_job_logs(identity) if info.driver_exit_code is not None else ""
    note(f"moco-ray: the job {identity} failed: {_why(info, said)}")
    return info.driver_exit_code or 1


async def _follow(client: JobSubmissionClient, address: str, identity: str) -> JobInfo:
    shown, since, waiting, quiet_until = 0, 0.0, "", time.monotonic() + QUIET_SECONDS
    while True:
        try:
            info = client.get_job_info(identity)
            if info.status == JobStatus.PENDING:
                if info.message and info.message != waiting and time.monotonic() > quiet_until:
                    waiting = info.message
                    note(f"moco-ray: {' '.join(waiting.split())}")
                await asyncio.sleep(1)
                continue
            seen = 0
            async for text in client.tail_job_logs(identity):  # from the beginning, each time
                new = text[max(0, shown - seen) :]
                seen += len(text)
                shown, since = max(shown, seen), 0.0
                print(new, end="", flush=True)
            info = client.get_job_info(identity)
            if info.status.is_terminal():
                return info
            await asyncio.sleep(1)  # the log ends a moment before the status changes
        except (RuntimeError, OSError, aiohttp.ClientError) as error:
            since = since or time.monotonic()
            if time.monotonic() - since > RECONNECT_SECONDS:
                raise UserError(
                    f"{address} does not answer ({_last_line(error)}); the job {identity} may go on without this log: `ray job status "
                    f"{identity} --address {address}`, and after the head was lost submit it again"
                ) from error
            await asyncio.sleep(2)


def _why(info: JobInfo, said: str) -> str:
    """Why a job failed, in a line, with the cure where we know it."""
    if "No module named moco_ray" in said or "No module named 'moco_ray'" in said:
        return "the cluster's image has no moco_ray; leave --use-image out, or build the image of infra/docker"
    for line in reversed(said.splitlines()):
        if line.startswith("ModuleNotFoundError: "):
            return f"{line}; the cluster's Python needs what moco_ray needs: an image as infra/docker builds it, or pip install moco_ray there"
    if info.driver_exit_code is not None:
        return f"its command left with code {info.driver_exit_code}"
    return " ".join((info.message or "no reason is given").split())[-500:]


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if any(map(str.isalnum, line))]
    return (lines or [type(error).__name__])[-1].strip()[:500]
