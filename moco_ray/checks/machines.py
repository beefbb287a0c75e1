"""The machines against what the run needs of them. Judges what they told (node.py); asks nobody."""

from collections.abc import Mapping

from moco_ray.checks.finding import Finding, failed, few, ok, sized, warning
from moco_ray.checks.node import TENSORBOARD_PORT, Node
from moco_ray.plan import Workers
from moco_ray.recipe import Recipe

FEW_FILES, SOME_FILES = 1024, 4096  # that a process may open

Nodes = Mapping[str, Node]  # name of the machine -> what it told


def answered(answers: Mapping[str, Node | BaseException]) -> Finding:
    silent = [name for name, answer in answers.items() if not isinstance(answer, Node)]
    if not silent:
        return ok("nodes", f"{len(answers)} answered: {few(answers)}")
    error = str(answers[silent[0]]).strip().splitlines() or ["no reason"]
    return failed(
        "nodes",
        f"{few(silent)} cannot run moco_ray: {error[-1]}",
        "install the same moco_ray and its packages on every node (or give the job a runtime environment), and see that the node is well",
    )


def versions(nodes: Nodes) -> Finding:
    """Equal on all: the ranks must compute the same, and Ray refuses other versions of itself."""
    first_name, first = next(iter(nodes.items()))
    other = [
        f"{what} {node.versions.get(what, 'none')} on {name}, {version} on {first_name}"
        for name, node in nodes.items()
        for what, version in first.versions.items()
        if node.versions.get(what) != version
    ]
    if other:
        return failed("versions", f"they differ: {few(other, 3)}", "install the same on every node; best from one image")
    return ok("versions", ", ".join(f"{what} {version}" for what, version in first.versions.items()))


def gpus(nodes: Nodes, seen_by_ray: int, workers: Workers) -> Finding:
    """What Ray can give to workers: one each, or none at all."""
    there, least = sum(node.gpus for node in nodes.values()), workers.least or workers.most
    if seen_by_ray == 0:
        if there:
            cure = "start Ray with --num-gpus, and without CUDA_VISIBLE_DEVICES set to nothing"
            return warning("GPUs", f"the nodes have {there}, and Ray knows of none: the workers would use CPUs", cure)
        return ok("GPUs", "none: the workers use CPUs")
    without = [name for name, node in nodes.items() if node.gpus and not node.cuda_build]
    if without:
        return failed("GPUs", f"torch on {few(without)} is built without CUDA", "install torch's build for CUDA there")
    if seen_by_ray < least:
        return failed("GPUs", f"Ray has {seen_by_ray} for {least} workers", f"--workers {seen_by_ray}, or more GPUs; a worker takes one")
    return ok("GPUs", f"Ray has {seen_by_ray} for {workers} workers")


def precision(nodes: Nodes, recipe: Recipe, on_gpus: bool) -> Finding:
    """bfloat16 on CPUs that would emulate it: see method/encoder.refuse_emulated_precision."""
    wanted = recipe.encoder.precision
    slow = [name for name, node in nodes.items() if not node.has_bfloat16]
    if wanted == "bfloat16" and slow and not on_gpus:
        return failed("precision", f"bfloat16 would be emulated by the CPU of {few(slow)}, at many times the cost of float32", "encoder.precision=float32")
    return ok("precision", wanted)


def object_store(nodes: Nodes, stores: Mapping[str, float], need_bytes: int, world: int) -> list[Finding]:
    """Ray's object store, and the shared memory it lies in, against the crops of all ranks. `stores`: bytes on each node."""
    total, about = sum(stores.values()), f"the crops of {world} ranks take up to {sized(need_bytes)}"
    cure = "fewer data tasks or workers, smaller augment.image_pixels or batch; or give Ray more: `ray start --object-store-memory=BYTES`"
    if need_bytes > total:
        found = failed("object store", f"{about}; Ray's object stores hold {sized(total)}, and would spill to disk all the time", cure)
    else:
        judged = f"{about} of Ray's {sized(total)}"
        found = warning("object store", judged, cure) if need_bytes > 0.5 * total else ok("object store", judged)
    each = need_bytes / max(1, len(nodes))
    small = [name for name, node in nodes.items() if node.shared_memory_bytes < each]
    tight = [name for name, node in nodes.items() if node.shared_memory_bytes < stores.get(name, 0)]
    cure = "make /dev/shm larger (docker: --shm-size=8g; Kubernetes: an emptyDir with medium Memory)"
    least = min(node.shared_memory_bytes for node in nodes.values())
    if small:
        return [found, failed("shared memory", f"/dev/shm of {few(small)} has {sized(least)} free, and a node needs {sized(each)}", cure)]
    if tight:
        judged = f"/dev/shm of {few(tight)} has {sized(least)} free, less than Ray's object store there may take: Ray uses /tmp instead"
        return [found, warning("shared memory", judged, cure)]
    return [found, ok("shared memory", f"{sized(least)} free in /dev/shm")]


def open_files(nodes: Nodes) -> Finding:
    name, node = min(nodes.items(), key=lambda item: item[1].open_files if item[1].open_files >= 0 else 2**63)
    found = f"a process may open {node.open_files:,} on {name}" if node.open_files >= 0 else "no limit"
    cure = "ulimit -n 65536 before Ray is started (in a service: LimitNOFILE)"
    if 0 <= node.open_files < FEW_FILES:
        return failed("open files", found, cure)
    return warning("open files", found, cure) if 0 <= node.open_files < SOME_FILES else ok("open files", found)


def network(nodes: Nodes) -> Finding:
    """The interface by which ranks find each other: gloo's and, unless NCCL_SOCKET_IFNAME says otherwise, NCCL's choice is alike."""
    used = {name: f"{node.interface or 'the one of its name'} {node.interface_address or '(no address)'}" for name, node in nodes.items()}
    told = "; ".join(f"{what} on {name}" for name, what in list(used.items())[:3])
    if len({node.machine for node in nodes.values()}) == 1:
        return ok("network", f"one machine; gloo uses {told}")
    lost = [name for name, node in nodes.items() if not node.interface_address or node.interface_address.startswith("127.")]
    if lost:
        return failed(
            "network",
            f"gloo on {few(lost)} would use {used[lost[0]]}, which no other node can reach",
            "set GLOO_SOCKET_IFNAME (with GPUs NCCL_SOCKET_IFNAME) there to the interface that the nodes share, as eth0, before Ray is "
            "started; or mend the host's name in /etc/hosts",
        )
    return ok("network", f"gloo uses {told}{' ..' if len(used) > 3 else ''}")


def ports(nodes: Nodes, here: Node) -> Finding:
    """Whether a process group can listen, and TensorBoard here."""
    shut = {name: node.can_listen for name, node in nodes.items() if node.can_listen}
    if shut:
        name, why = next(iter(shut.items()))
        return failed("ports", f"no process can listen on {name} at {nodes[name].interface_address or nodes[name].address} ({why})", "set GLOO_SOCKET_IFNAME to an interface of that machine, and open its ports to the other nodes")
    if not here.tensorboard_port_free:
        return warning("ports", f"TensorBoard's port {TENSORBOARD_PORT} is taken on this machine", "tensorboard --port 6007, or stop what listens there")
    return ok("ports", f"free ones for the ranks, and {TENSORBOARD_PORT} for TensorBoard")


def reach(nodes: Nodes) -> Finding:
    """Whether every node reads data and storage, with its own credentials and mounts."""
    for what, told in (("the storage", {n: node.unshared for n, node in nodes.items()}), ("the data", {n: node.unread for n, node in nodes.items()})):
        blind = [name for name, error in told.items() if error]
        if blind:
            why = told[blind[0]].rpartition("; ")[0] or told[blind[0]]
            cure = "give every node the same credentials; a folder must be shared by all nodes, or be a URI"
            return failed("reach", f"{few(blind)} cannot read {what}: {why}", cure)
    if len(nodes) == 1:
        return ok("reach", "data and storage are read in a task")
    return ok("reach", f"data and storage are read on all {len(nodes)} nodes")
