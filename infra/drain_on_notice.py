#!/usr/bin/env python3
"""Tells Ray that this machine is taken away, so that the run writes a checkpoint in time: the agent of spot nodes.

    drain_on_notice.py --cloud aws               # polls the metadata service until there is a notice
    drain_on_notice.py --cloud gcp
    drain_on_notice.py --now --seconds 45        # drains at once, and waits until Ray's node has gone (a pod's preStop hook)

Responsible for noticing, and for `ray drain-node` on the Ray node of this machine with the time that is left. Not responsible for
what the run does then (README, "On machines that come and go"), nor for stopping anything. Standard library only.

AWS (IMDSv2): `spot/instance-action` names the time of an interruption, two minutes ahead; a recommendation to rebalance is no
notice and is not asked for. GCP: `instance/preempted` becomes TRUE about 30 s before the machine stops.
Exit code: 0 after a drain that Ray accepted, 1 if it could not be asked.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

POLL_SECONDS = 2.0  # a notice of GCP leaves 30 s
TRIES, PAUSE_SECONDS = 5, 2.0  # at asking Ray
GCP_SECONDS = 25  # of the 30 that are documented: some have passed when it is seen
ADDRESSES = {"aws": "http://169.254.169.254", "gcp": "http://metadata.google.internal"}


def ask(url: str, method: str = "GET", headers: dict[str, str] | None = None) -> str | None:
    """The body; None where there is nothing (404) or no answer: the next poll will see."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method, headers=headers or {}), timeout=2) as answer:
            return answer.read().decode()
    except (OSError, urllib.error.HTTPError):
        return None


def aws_seconds_left(address: str) -> int | None:
    token = ask(f"{address}/latest/api/token", "PUT", {"X-aws-ec2-metadata-token-ttl-seconds": "60"})
    action = ask(f"{address}/latest/meta-data/spot/instance-action", headers={"X-aws-ec2-metadata-token": token or ""})
    if action is None:
        return None
    when = datetime.datetime.fromisoformat(json.loads(action)["time"].replace("Z", "+00:00"))
    return max(0, int((when - datetime.datetime.now(datetime.UTC)).total_seconds()))


def gcp_seconds_left(address: str) -> int | None:
    preempted = ask(f"{address}/computeMetadata/v1/instance/preempted", headers={"Metadata-Flavor": "Google"})
    return GCP_SECONDS if preempted and preempted.strip() == "TRUE" else None


CLOUDS: dict[str, Callable[[str], int | None]] = {"aws": aws_seconds_left, "gcp": gcp_seconds_left}


def ray_node(processes: Path) -> tuple[str, str] | None:
    """(Ray's id of this node, address of the head), from the command line of its raylet; None if none runs."""
    for command in processes.glob("[0-9]*/cmdline"):
        try:
            words = command.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it ended meanwhile
            continue
        if Path(words[0]).name != "raylet":
            continue
        told = dict(word.lstrip("-").split("=", 1) for word in words[1:] if word.startswith("--") and "=" in word)
        if told.get("node_id") and told.get("gcs-address"):
            return told["node_id"], told["gcs-address"]
    return None


def drain(processes: Path, message: str, seconds: int) -> bool:
    """Whether Ray was told, in a few tries."""
    deadline = time.monotonic() + seconds
    for _ in range(TRIES):
        found, left = ray_node(processes), max(0, round(deadline - time.monotonic()))
        if found:
            node, head = found
            done = subprocess.run(
                ["ray", "drain-node", "--address", head, "--node-id", node, "--reason", "DRAIN_NODE_REASON_PREEMPTION",
                 "--reason-message", message, "--deadline-remaining-seconds", str(left)]
            )  # fmt: skip
            if done.returncode == 0:
                print(f"drained {node}: {message}, {left} s left", flush=True)
                return True
        time.sleep(min(PAUSE_SECONDS, left))
    print(f"not drained: {'ray drain-node failed' if found else 'no raylet runs here'}", file=sys.stderr, flush=True)
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--cloud", choices=CLOUDS)
    what.add_argument("--now", action="store_true", help="there was a notice already")
    parser.add_argument("--seconds", type=int, default=45, help="with --now: the time that is left (%(default)s)")
    # Only tests have other ones.
    parser.add_argument("--metadata", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--processes", type=Path, default=Path("/proc"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.now:
        end = time.monotonic() + options.seconds
        told = drain(options.processes, "the pod is to end", options.seconds)
        while told and ray_node(options.processes) and time.monotonic() < end:  # the pod is stopped when this returns
            time.sleep(0.2)
        return 0 if told else 1
    address = options.metadata or ADDRESSES[options.cloud]
    print(f"waiting for a notice of {options.cloud} on {os.uname().nodename}", flush=True)
    while (seconds := CLOUDS[options.cloud](address)) is None:
        time.sleep(POLL_SECONDS)
    return 0 if drain(options.processes, f"spot notice of {options.cloud}", seconds) else 1


if __name__ == "__main__":
    sys.exit(main())
