"""By hand, not in CI: one run suffers many random failures and must end as if nothing had happened.

    python -m tests.soak --failures 60 --seed 1

Kills workers, nodes (another joins instead), the driver (the same command again), or drains a node with a short notice, at
random moments, also while the run is still recovering from the last one. At the end the losses and the last state are
compared with an undisturbed run (float64, 1e-8), and the counts and seconds are printed as JSON.
"""

import argparse
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.carried import Carried
from tests.clusters import Cluster

WAITS = (1.0, 30.0)  # seconds between two failures: a restart takes about 17
KINDS = {"worker": 4, "node": 3, "drain": 2, "driver": 1}  # weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--failures", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=160)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    with Cluster() as cluster, tempfile.TemporaryDirectory() as folder:
        run = Carried(Path(folder), cluster.environment, steps=arguments.steps, every=5)
        nodes = [cluster.add_node(2) for _ in range(2)]
        run.start("1:2")
        run.wait_for_step(3)
        began, done, in_words = time.time(), Counter(), ""
        while sum(done.values()) < arguments.failures:
            time.sleep(draw.uniform(*WAITS))
            if run.process.poll() is not None:
                raise SystemExit(f"the run ended with {run.process.returncode} after {sum(done.values())} failures:\n{run.words}")
            kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
            if fail(kind, draw, cluster, nodes, run):
                done[kind] += 1
                print(f"{time.time() - began:6.1f} s  {sum(done.values()):2} {kind}, at step {reached(run)}", flush=True)
            in_words = run.words
        suffered = time.time() - began
        run.finish(900)
        run.refuse_other_than_undisturbed()
        again = run.events("continuing")
        print(in_words[-2000:])
        print(json.dumps({
            "failures": dict(done), "minutes": round(suffered / 60, 1), "attempts": len(run.attempts()),
            "restarts_told": len(again), "steps": arguments.steps,
            "steps_recomputed": sum(recomputed(run)), "seconds_without_a_step_a_restart": pauses(run),
            "equal_to_undisturbed": "losses and last state to 1e-8",
        }, indent=1))  # fmt: skip


def fail(kind: str, draw: random.Random, cluster: Cluster, nodes: list, run: Carried) -> bool:
    """Let one thing fail; False if there was nothing to fail, as no worker while they are being started."""
    if kind == "driver":
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait()
        run.start("1:2")
        return True
    node = draw.choice(nodes)
    if kind == "worker":
        if not node.train_workers():
            return False
        node.kill_train_worker()
        return True
    if kind == "node":
        node.kill()
    else:
        node.drain(6)
    nodes.remove(node)
    nodes.append(cluster.add_node(2))
    return True


def pauses(run: Carried) -> dict[str, float]:
    """Seconds from the last step of an attempt to the first new one of a later attempt, over the steps as written down."""
    entries = run.metrics()
    found = sorted(b["wall_time"] - a["wall_time"] for a, b in zip(entries, entries[1:], strict=False) if a["attempt"] != b["attempt"])
    return {"median": round(found[len(found) // 2], 1), "longest": round(found[-1], 1), "count": len(found)}


def reached(run: Carried) -> int:
    return (run.metrics() or [{"step": 0}])[-1]["step"]


def recomputed(run: Carried) -> list[int]:
    """Steps computed again at each start: by the attempts that the record names for each step, and where the next began."""
    attempts, last = run.attempts(), {}
    for entry in run.metrics():
        last[entry["attempt"]] = entry["step"]
    reached_by, found = 0, []
    for attempt in attempts:
        found.append(max(0, reached_by - attempt["from_step"]))
        reached_by = max(reached_by, last.get(attempt["number"], 0))
    return found


if __name__ == "__main__":
    main()
