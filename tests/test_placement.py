"""Where workers, data tasks and the driver sit: the rules on made-up nodes, and a labelled cluster of real ones."""

import time

import pytest

from moco_ray.data import stream
from moco_ray.errors import UserError
from moco_ray.placement import (
    ANYWHERE,
    DATA,
    GROUP,
    NODE_ID,
    TRAIN,
    DataPlace,
    Machine,
    place_data,
    seating,
    worker_homes,
)
from moco_ray.plan import Workers
from moco_ray.session import Outlook, Room, _room
from tests.carried import Carried
from tests.clusters import Cluster, at_work

HEAD = Machine("h", "head", 0, 0, "head")
GPUS = [Machine("a", "gpu-a", 32, 4, TRAIN), Machine("b", "gpu-b", 32, 4, TRAIN)]
READERS = [Machine("c", "data-c", 16, 0, DATA), Machine("d", "data-d", 16, 0, DATA)]
FIRST = {GROUP: DATA}


def without_labels(machines):
    return [machine._replace(group="") for machine in machines]


@pytest.mark.parametrize(
    "machines, claim, seats, cpus, selectors",
    [
        # no label at all: wherever Ray puts them, in all that the workers leave
        (without_labels([HEAD, *GPUS, *READERS]), 1, "aaaabbbb", 88, ()),
        # a data group: all tasks there, and elsewhere only when none of it lives
        ([HEAD, *GPUS, *READERS], 1, "aaaabbbb", 32, (FIRST, ANYWHERE)),
        ([HEAD, *GPUS, READERS[0]], 1, "aaaabbbb", 16, (FIRST, ANYWHERE)),
        # none: each worker's own node, as all have their share of the CPUs
        ([HEAD, *GPUS], 1, "aaaabbbb", 56, (FIRST, {NODE_ID: "a"}, ANYWHERE)),
        ([HEAD, *GPUS], 1, "aabbbb", 58, (FIRST, ANYWHERE)),  # a quarter of the CPUs is b's, for two thirds of the ranks
        ([HEAD, GPUS[0], Machine("e", "other", 32)], 1, "aaaa", 60, (FIRST, ANYWHERE)),  # half of the CPUs has no worker
        # CPU workers of an elastic run may sit on data nodes: what they leave counts, and a node that they fill does not
        ([HEAD, *READERS], 15.5, "cd", 1, (FIRST, ANYWHERE)),
        ([HEAD, Machine("t", "train", 16, 0, TRAIN), READERS[0]], 8, "tcc", 8, (FIRST, ANYWHERE)),
    ],
)
def test_data_tasks_take_the_data_group_or_the_workers_own_nodes_or_any(machines, claim, seats, cpus, selectors):
    found = place_data(machines, claim, len(seats), list(seats), "a")
    assert (found.cpus, found.selectors) == (cpus, selectors)


def test_where_seats_are_not_known_the_cpus_of_the_data_group_count():
    assert place_data([HEAD, *GPUS, *READERS], 1, 8).cpus == 32
    assert place_data([HEAD, *GPUS], 1, 8).selectors == (FIRST, ANYWHERE)


def test_what_ray_is_told_is_one_selector_and_the_others_as_what_to_fall_back_on():
    assert DataPlace(1).options == {}
    told = DataPlace(1, (FIRST, {NODE_ID: "a"}, ANYWHERE)).options
    assert told == {"label_selector": FIRST, "fallback_strategy": [{"label_selector": {NODE_ID: "a"}}, {"label_selector": {}}]}


def test_cpu_workers_keep_to_the_train_group_and_gpu_workers_and_elastic_ones_find_their_own_way():
    train = Machine("t", "train", 8, 0, TRAIN)
    assert worker_homes([HEAD, train, *READERS], elastic=False) == ([train], {GROUP: TRAIN})
    for machines, elastic in (([HEAD, train, *READERS], True), ([HEAD, *GPUS, *READERS], False), ([HEAD, *READERS], False)):
        assert worker_homes(machines, elastic) == (machines, None)


def test_that_no_data_node_is_left_is_told_with_its_cure(monkeypatch):
    train, now = [Machine("t", "train", 4, 0, TRAIN)], []
    monkeypatch.setattr("moco_ray.session._living", lambda: now)
    for claim, machines, told in (
        (1, [*train, *READERS], ""),
        (1, without_labels(train), ""),
        (1, train, "no data node is left: data tasks move to the other nodes (2 CPUs)"),
        (2, train, "the run waits for one; start a node of the data group, or stop the run and resume it with fewer --workers"),
    ):
        now[:] = machines
        found = Outlook(Room(claim, {"CPU": claim}), Workers(2)).readers_gone(["t", "t"])
        assert found.endswith(told) and bool(found) == bool(told)


def test_workers_of_the_train_group_have_all_of_it_where_a_data_group_reads_for_them(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "here")
    train, reader = Machine("t", "train", 4, 0, TRAIN), READERS[0]
    assert _room([HEAD, train, reader], Workers(2))[:2] == (2, {"CPU": 2})
    assert _room([HEAD, train], Workers(2))[:2] == (1, {"CPU": 1})  # a part of the train group reads
    with pytest.raises(UserError, match="the train group of the Ray cluster has 4 CPUs: 5 workers of 1"):
        _room([HEAD, train, reader], Workers(5))
    assert _room(without_labels([HEAD, train, reader]), Workers(2)).selector is None


def test_the_line_names_every_rank_s_node():
    data = DataPlace(16, words="the data group: data-c (16 CPUs)")
    assert seating(["x", "x", "y", "x"], data, "head") == (
        "workers 0-1 and 3 on x, 2 on y; data tasks: the data group: data-c (16 CPUs); driver and controller on head"
    )
    many = place_data([Machine(str(n), f"n{n}", 2, 0, DATA) for n in range(6)], 1, 1)
    assert many.words == "the data group: n0, n1, n2, n3 and 2 more (12 CPUs)"


def test_each_pipeline_asks_anew_where_its_tasks_run(monkeypatch):
    """A data group that grew or shrank counts from the next pipeline on."""
    shapes, started = (stream.Shape(1, 1, number, 0.1, {"number": number}) for number in (3, 5, 7)), []
    monkeypatch.setattr(stream, "TASKS_PER_PIPELINE", 4)
    monkeypatch.setattr(stream, "_start_pipeline", lambda work, shape, part: started.append(shape.options) or iter([{"task": [n]} for n in part]))

    found = [columns["task"][0] for columns in stream.in_order(None, 9, lambda: next(shapes))]
    assert found == list(range(9)) and started == [{"number": 3}, {"number": 5}, {"number": 7}]


class Watched:
    """Which nodes were seen to run what, by the names of their processes, in one part of a run's life."""

    def __init__(self, cluster: Cluster):
        self._nodes, self.data, self.workers = cluster.nodes, set(), set()

    def look(self) -> None:
        for node in self._nodes:
            for work in at_work(node.process.pid).values():
                if "run_tasks" in work:
                    self.data.add(node.name)
                if "RayTrainWorker" in work:
                    self.workers.add(node.name)


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """A run of two workers on two train nodes and a data node, which is lost in the middle: the run, and what was seen before and after."""
    with Cluster() as cluster:
        nodes = [cluster.add_node(cpus, f"{GROUP}={group}") for cpus, group in ((2, TRAIN), (1, TRAIN), (2, DATA))]
        run = Carried(tmp_path_factory.mktemp("placed"), cluster.environment, steps=32, every=16)
        run.start("2")
        before, after = Watched(cluster), Watched(cluster)

        def watch(seen: Watched, done) -> None:
            end = time.monotonic() + 150
            while not done():
                assert time.monotonic() < end, run.words
                seen.look()
                time.sleep(0.3)

        watch(before, lambda: len(run.metrics()) >= 14 or run.process.poll() is not None)
        nodes[2].kill()
        watch(after, lambda: run.process.poll() is not None)
        run.finish()
        yield run, before, after


def test_workers_are_packed_on_one_node_of_the_train_group_and_data_tasks_run_on_the_data_group(story):
    run, before, _ = story
    assert before.workers == {"node1"}  # node2 has room for one
    assert before.data == {"node3"}
    assert run.attempts()[0]["nodes"] == ["node1", "node1"] and run.attempts()[0]["driver"] == "head"
    line = "workers 0-1 on node1; data tasks: the data group: node3 (2 CPUs); driver and controller on head"
    assert run.events("placed")[0]["text"] == line and line in run.words


def test_a_data_group_that_is_gone_costs_the_run_nothing(story):
    run, _, after = story
    assert run.events("node_lost") and "node2" in after.data
    assert [event["text"] for event in run.events("readers_gone")] == ["no data node is left: data tasks move to the other nodes (1 CPU)"]
    run.refuse_other_than_undisturbed()
