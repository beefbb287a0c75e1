"""What Ray knows of the machines, and how Ray Train is made to know it soon.

Ray Train 2.60 plans its next group of workers with a view of the cluster that is renewed every 20 s, and waits a minute for
the machines that are no longer there; so a lost node costs more than a minute (found by experiment, and in its source). Renewing
the view after a failure, once the head has noticed the loss, brings that to seconds. The actor that holds the view is
internal to Ray: all here is best effort, and without it a run is only slower to go on.
"""

import contextlib
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from moco_ray.data.on_ray import pipeline_name
from moco_ray.ray_job import own_job

COORDINATOR = "AutoscalingCoordinator"
ANSWER_SECONDS = 5.0
KEPT_SECONDS = 180.0  # that the coordinator keeps what a pipeline asked for


def ended_by() -> str:
    """What a person ends this driver with: Ctrl-C, or in a Ray job a command; its log's reader leaves the job alone."""
    return f"`ray job stop {own_job()}`" if own_job() else "Ctrl-C"


def living() -> dict[str, str]:
    """Id to name of each node that Ray calls alive; of nodes of one name the end of the id is part of it."""
    names = {node["NodeID"]: node["NodeName"] or node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    count = Counter(names.values())
    return {node: name if count[name] == 1 else f"{name}/{node[-6:]}" for node, name in names.items()}


def of_nodes(kind: str) -> dict[str, float]:
    """Name of each living node -> how much of a resource (CPU, GPU, object_store_memory) it has."""
    resources, names = {node["NodeID"]: node["Resources"] for node in ray.nodes()}, living()
    return {name: resources[node].get(kind, 0.0) for node, name in names.items()}


def keep_helpers_here() -> None:
    """Have the actors that Ray Data shares between all runs on this node, the driver's.

    Ray starts them on the node of whoever needs them first, a worker's, where they outlive the run: an autoscaler would never
    call that node idle.
    """
    with contextlib.suppress(Exception):  # internal to Ray, and errors of any kind: without it one node stays up
        from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import (
            get_or_create_autoscaling_coordinator,
        )
        from ray.data._internal.stats import get_or_create_stats_actor

        get_or_create_autoscaling_coordinator()
        get_or_create_stats_actor()


def nodes_leaving() -> dict[str, float | None]:
    """Id of each node that is drained, and when it goes (UNIX time in seconds, where that is known).

    A spot machine's notice, or SIGTERM to `ray start --block`. Ray Train has a watcher for it (`get_preemption_info`), which
    is one more process to start at each restart, and after it Ray Train restarts without asking anybody: not used.
    """
    found: dict[str, int] = {}
    with contextlib.suppress(Exception):  # internal to Ray, and errors of any kind: without it a machine goes unannounced
        found = ray._private.state.state.get_draining_nodes()
    return {node: deadline / 1000 or None for node, deadline in found.items()}


def wait_until_noticed(patience_seconds: float) -> None:
    """Wait until Ray calls no node alive that does not take a connection."""
    end = time.monotonic() + patience_seconds
    while _unreachable() and time.monotonic() < end:
        time.sleep(0.2)


def recount() -> None:
    """Make Ray Train see the machines as they are now. Raises RayError, ValueError or TimeoutError where it cannot."""
    actor = ray.get_actor(COORDINATOR, namespace=COORDINATOR)
    ray.get(actor.get_reserved_resources.remote("", recompute=True), timeout=ANSWER_SECONDS)


def forget(request: str) -> None:
    """Let go of what a Ray Train run that died had asked for; Ray itself would keep it for three minutes.

    `request` is that run's id. The older request has precedence, and the next run would wait. Best effort.
    """
    with contextlib.suppress(ray.exceptions.RayError, ValueError, TimeoutError):
        actor = ray.get_actor(COORDINATOR, namespace=COORDINATOR)
        ray.get(actor.cancel_request.remote(f"train-{request}"), timeout=ANSWER_SECONDS)


def forget_pipelines(silent_seconds: float) -> None:
    """Let go of what Ray Data's pipelines of this driver had asked for and have not asked again for so long: their processes were killed.

    A living one asks every 10 s. Ray itself keeps a request for three minutes, and with it nodes that nobody needs, and a share of the CPUs that the
    others are told of. Best effort.
    """

    def forget(coordinator, prefix: str) -> None:  # inside a function, or its module would have to be on the actor's path
        import time

        asked_before = time.time() + KEPT_SECONDS - silent_seconds
        for name, request in list(coordinator._ongoing_reqs.items()):
            if name.startswith(prefix) and request.expiration_time <= asked_before:
                coordinator.cancel_request(name)

    with contextlib.suppress(ray.exceptions.RayError, ValueError, TimeoutError):
        actor = ray.get_actor(COORDINATOR, namespace=COORDINATOR)
        ray.get(actor.__ray_call__.remote(forget, f"data-{pipeline_name()}"), timeout=ANSWER_SECONDS)


def autoscaler_refuses() -> bool:
    """Whether Ray's second autoscaler says that it cannot make room for all that it is asked for; False where there is none. Best effort."""
    with contextlib.suppress(Exception):  # internal to Ray, and errors of any kind: without it a run only waits for what there may never be
        from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply
        from ray.experimental.internal_kv import internal_kv_get_gcs_client

        reply = GetClusterStatusReply()
        reply.ParseFromString(internal_kv_get_gcs_client().get_cluster_status(timeout_s=ANSWER_SECONDS))
        return len(reply.autoscaling_state.infeasible_cluster_resource_constraints) > 0
    return False


def _unreachable() -> list[str]:
    found = []
    for node in ray.nodes():
        if node["Alive"]:
            try:
                socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=1).close()
            except OSError:
                found.append(node["NodeID"])
    return found


def ask_each_node(question: Callable[[str], Any], seconds: float) -> dict[str, Any]:
    """Name of each living node -> what `question(its address)` answers there, or the exception that came instead.

    A task that claims no CPU, on all nodes at once; a node that is not heard of within `seconds` answers with a TimeoutError.
    """
    task, names = ray.remote(num_cpus=0, max_retries=0)(_ask), living()
    asked = {
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(question): name
        for node, name in names.items()
    }
    done, late = ray.wait(list(asked), num_returns=len(asked), timeout=seconds)
    answers: dict[str, Any] = {asked[each]: TimeoutError(f"no answer within {seconds:g} s") for each in late}
    for each in late:
        ray.cancel(each)
    for each in done:
        try:
            answers[asked[each]] = ray.get(each)
        except ray.exceptions.RayError as error:
            answers[asked[each]] = error
    return dict(sorted(answers.items()))


def _ask(question: Callable[[str], Any]) -> Any:
    return question(ray.util.get_node_ip_address())
