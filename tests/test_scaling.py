"""show-plan --gpus: the model of a cluster against numbers worked out by hand, and against what the code really sends."""

import math
import tomllib
from pathlib import Path

import pytest
import torch

from moco_ray.cli import main
from moco_ray.cluster_facts import ClusterFacts, fact_names
from moco_ray.data.stream import tasks_of_a_rank
from moco_ray.errors import UserError
from moco_ray.method.shuffle import permutation, route
from moco_ray.plan import Plan, rows_of
from moco_ray.ranks import Ranks
from moco_ray.recipe import Recipe
from moco_ray.scaling import predict, recipe_for, tasks_in_flight
from moco_ray.show_scale import gpu_counts, gradient_bytes
from moco_ray.traffic import Load, Ring, buckets, rows_leaving, unhidden
from tests import synthetic

ROOT = Path(__file__).parent.parent
MIB = 1 << 20


def load(*words: str, gradients: tuple[int, ...] = (100_000_000,), rows: int = 1_000_000) -> Load:
    """Batch 256 in 8 groups, crops of 100 x 100 (30,000 bytes), keys of 512 bytes, 39,060 steps; one bucket of 100 MB."""
    return Load(Plan(Recipe.of_overrides(["schedule.epochs=10", "augment.image_pixels=100", *words]), rows), gradients)


QUIET = (  # nothing but what a test asks for
    "network.latency_seconds=0", "link.latency_seconds=0", "input.core_seconds_per_image=1e-9", "input.bytes_per_image=1e-9",
    "input.share_from_other_nodes=0", "restarts.per_node_hour=0", "checkpoint.copy_bytes_per_second=1e18",
    "gpu.images_per_second=100", "gpu.backward_share=0", "node.gpus=1", "network.bytes_per_second=1e9", "price.head=0",
)  # fmt: skip


def facts(*words: str) -> ClusterFacts:
    return ClusterFacts.read(None, [*QUIET, *words])


def test_one_gpu_computes_at_its_own_rate():
    one = predict(load(), facts("gpu.fixed_seconds=0.44", "price.gpu_node=2"), 1)
    assert one.step_seconds == pytest.approx(256 / 100 + 0.44) and one.bound == "encoder"
    assert one.images_per_second == pytest.approx(256 / 3)
    assert one.hours == pytest.approx(39060 * 3 / 3600) and one.money == pytest.approx(2 * one.hours)
    assert one.network_bytes_per_second == pytest.approx(0, abs=1e-6)


ALL_WAITED_FOR = "gpu.images_per_second=1e12"  # so fast that nothing hides behind it


def test_what_a_step_sends_on_eight_machines_by_hand():
    """Of 32 rows 4 stay."""
    eight = predict(load(), facts(ALL_WAITED_FOR), 8)
    crops, keys, gradients = 28 * 30_000 / 1e9, 7 * 32 * 512 / 1e9, 2 * 7 / 8 * 0.1
    assert eight.step_seconds == pytest.approx(crops + keys + gradients)
    assert eight.parts[1:4] == pytest.approx((crops, keys, gradients)), "one after the other"
    assert eight.network_bytes_per_second * eight.step_seconds == pytest.approx(28 * 30_000 + 7 * 32 * 512 + 1.75e8)


def test_a_machine_of_eight_sends_its_rows_once_and_shares_its_network():
    """16 GPUs, 16 groups of 32: a node's 256 rows leave it by half; the ring of keys and gradients passes it once."""
    fast, few = (ALL_WAITED_FOR, "node.gpus=8"), (1000,)
    wide = load("batch.global_batch_size=512", "optimizer.learning_rate=0.06", gradients=few)
    both = predict(wide, facts(*fast, "link.bytes_per_second=1e15"), 16)
    assert both.nodes == 2 and both.step_seconds == pytest.approx((128 * 30_000 + 15 * 32 * 512 + 2 * 15 / 16 * 1000) / 1e9)
    apart = predict(load("batch.global_batch_size=512", "batch.shuffle_domain_groups=8", gradients=few), facts(*fast, "link.bytes_per_second=1e6"), 16)
    assert apart.step_seconds == pytest.approx((28 * 30_000 + 15 * 32 * 512 + 2 * 15 / 16 * 1000) / 1e6), "no image leaves its node"
    assert apart.network_bytes_per_second * apart.step_seconds == pytest.approx(15 * 32 * 512 + 2 * 15 / 16 * 1000)


def test_numbers_that_do_not_divide_the_groups_wait_for_the_rank_that_has_most():
    three = predict(load(), facts("network.bytes_per_second=1e15"), 3)
    assert three.parts.encoder == pytest.approx(96 / 100) and three.efficiency == pytest.approx(Plan(load().plan.recipe, 1000).efficiency(3))


def test_the_symmetric_form_computes_exchanges_and_gathers_twice():
    once, twice = (predict(load(*words), facts(ALL_WAITED_FOR), 8) for words in ((), ("contrast.symmetric=true",)))
    assert twice.step_seconds - once.step_seconds == pytest.approx((28 * 30_000 + 7 * 32 * 512) / 1e9)
    assert predict(load("contrast.symmetric=true"), facts(), 1).step_seconds == pytest.approx(2 * 2.56)


def test_gradients_in_bfloat16_are_half_the_bytes():
    exact, half = (predict(load(*words, gradients=(MIB, 10**8)), facts(), 8) for words in ((), ("optimizer.gradient_reduction=bfloat16",)))
    assert half.parts.all_reduce == pytest.approx(exact.parts.all_reduce / 2)
    assert load("optimizer.name=adamw").checkpoint_bytes == load().checkpoint_bytes + 100_000_000


def test_latency_counts_messages():
    quick = ("network.latency_seconds=1", "network.bytes_per_second=1e15")
    found = predict(load("run.dictionary_every_steps=3", "run.log_every_steps=5"), facts(*quick, ALL_WAITED_FOR), 8).parts
    assert (found.exchange, found.gather) == pytest.approx((7, 7))
    assert found.all_reduce == pytest.approx(6)  # 2 log2 8
    assert found.signals == pytest.approx((1 + 1) * 6 + 5 / 5 * 7)


def test_the_backward_hides_the_buckets_that_are_ready_before_its_end():
    ring = Ring(2, 1e6, 0.0)  # a bucket of so many MB takes as many seconds
    assert unhidden([1_000_000, 3_000_000], ring, 8.0) == pytest.approx(3), "the last is ready when the backward ends"
    assert unhidden([3_000_000, 1_000_000], ring, 4.0) == pytest.approx(3 + 3 + 1 - 4), "the first ends at 6"
    part = predict(load(), facts("gpu.backward_share=0.5"), 8).parts.all_reduce
    assert part == pytest.approx(0.175), "one bucket: all of it is ready at the end only"


def test_a_step_hides_the_exchange_of_the_next_and_its_queries_the_gather():
    """128 rows each: a quarter of 1.28 s for the keys, as long for the queries, the rest backward. A ring of 1 MB/s is a slow one."""
    crops, keys = 64 * 30_000, 128 * 512
    words = ("gpu.backward_share=0.5", "gpu.fixed_seconds=0.1")
    small = load(gradients=(8,))

    def parts(rate: float):
        return predict(small, facts(*words, f"network.bytes_per_second={rate}"), 2).parts

    assert parts(crops / 0.5)[1:4] == pytest.approx((0, 0, 0), abs=1e-4), "crops 0.5 s: they are there after keys and queries, 0.64, and the keys 0.02 s later"
    slow = parts(crops / 2)  # 2 s, and 0.07 for the keys behind them, where keys and queries take 0.64
    assert slow.exchange == pytest.approx(2 - 0.64, abs=1e-4) and slow.gather == pytest.approx(keys / (crops / 2))
    slower = parts(keys / 0.4)  # keys 0.4 s, of which the queries hide 0.32; crops before them would take 11.7
    assert slower.gather == pytest.approx(0.4) and slower.exchange == pytest.approx(crops / keys * 0.4 - 0.64, abs=1e-4)


def test_of_several_passes_only_the_last_hides_anything():
    whole, split = load(gradients=(50_000_000,) * 2), load("run.groups_per_forward=1", gradients=(50_000_000,) * 2)
    fast, slow = facts("gpu.backward_share=0.5"), facts("gpu.backward_share=0.5", "network.bytes_per_second=1e8")  # 0.05 and 0.5 s a bucket
    assert predict(whole, fast, 2).parts.all_reduce == pytest.approx(0.05), "the last is ready at the end, after 0.64 s"
    assert predict(split, fast, 2).parts.all_reduce == pytest.approx(0.05)
    assert predict(whole, slow, 2).parts.all_reduce == pytest.approx(0.32 + 1.0 - 0.64)
    assert predict(split, slow, 2).parts.all_reduce == pytest.approx(0.08 + 1.0 - 0.16), "a quarter of the rows"


def test_input_that_does_not_keep_up_is_waited_for_and_data_nodes_mend_it():
    """4 cores, one a worker: of 100 images/s a GPU at 0.05 core seconds they make 60 where 100 are wanted."""
    words = ("input.core_seconds_per_image=0.05", "node.cores=4")
    short = predict(load(), facts(*words), 1)
    assert short.bound == "input" and short.images_per_second == pytest.approx(60) and short.parts.input == pytest.approx(256 / 60 - 2.56)
    mended = predict(load(), facts(*words, "data_nodes.most=9", "data_nodes.cores=2", "price.data_node=1", "price.gpu_node=1"), 1)
    assert (mended.data_nodes, mended.bound) == (3, "encoder") and mended.images_per_second == pytest.approx(100)
    assert mended.network_bytes_per_second == pytest.approx(100 * 60_000), "all crops are made there"
    assert mended.money == pytest.approx(4 * mended.hours)
    few = predict(load(), facts(*words, "data_nodes.most=1", "data_nodes.cores=2"), 1)
    assert (few.data_nodes, few.images_per_second) == (0, pytest.approx(60)), "they would do all of it, and slower"
    assert predict(load(), facts("input.bytes_per_image=1e6", "input.storage_bytes_per_second=8e6"), 1).images_per_second == pytest.approx(8)


def test_without_a_core_for_input_there_is_no_run():
    with pytest.raises(UserError, match="no core is left for input: node.cores 1 and node.cores_per_worker 1; raise the first, or data_nodes.most"):
        predict(load(), facts("node.cores=1"), 2)


def test_crops_that_travel_take_their_part_of_the_network():
    """Two GPUs, 128 rows each, all waited for: 7.68 MB of crops come beside 1.92 + 0.066 + 100 MB of collectives: T = c / (w - i/T)."""
    found = predict(load(), facts("input.share_from_other_nodes=1", ALL_WAITED_FOR), 2)
    collective, came = 64 * 30_000 + 128 * 512 + 1e8, 128 * 60_000
    assert found.step_seconds == pytest.approx((collective + came) / 1e9, rel=1e-6)
    slow = predict(load(gradients=(1000,)), facts("input.share_from_other_nodes=1", "network.bytes_per_second=1e6"), 1)
    assert slow.bound == "encoder", "one machine has its own crops"


def test_checkpoints_are_copied_every_so_many_steps_or_minutes():
    size = load().checkpoint_bytes
    assert size == 3 * 100_000_000 + 65536 * (512 + 8)
    by_step = predict(load("run.checkpoint_every_steps=10"), facts(f"checkpoint.copy_bytes_per_second={size}"), 1)
    assert by_step.parts.checkpoint == pytest.approx(0.1) and not by_step.saves_skipped
    by_clock = predict(load("run.checkpoint_every_minutes=0.1"), facts(f"checkpoint.copy_bytes_per_second={size}"), 1)
    assert by_clock.parts.checkpoint == pytest.approx(by_clock.step_seconds / 6)  # one second in six
    assert predict(load("run.checkpoint_every_steps=1"), facts("checkpoint.save_bytes_per_second=1e7"), 1).saves_skipped


def test_restarts_cost_their_seconds_and_half_the_time_between_checkpoints():
    words = ("run.checkpoint_every_steps=1000", "run.checkpoint_every_minutes=10")
    found = predict(load(*words), facts("restarts.per_node_hour=2", "restarts.seconds=60", "price.head=1", "price.gpu_node=3"), 1)
    lost = 2 * (60 + 300) / 3600
    assert found.hours == pytest.approx(39060 * 2.56 / 3600 / (1 - lost)) and found.money == pytest.approx(4 * found.hours)
    assert predict(load(), facts("restarts.per_node_hour=20"), 1).hours == math.inf


@pytest.mark.parametrize("domain", [0, 4])
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_rows_that_leave_are_those_of_the_shuffle(world, domain):
    recipe = synthetic.recipe(batch={"bn_group_size": 8, "global_batch_size": 64, "shuffle_domain_groups": domain})
    plan, steps = synthetic.plan(recipe), 64
    rows = [rows_of(plan, world, rank) for rank in range(world)]
    for rank in range(world):
        mine = range(rows[rank].start // 8, rows[rank].stop // 8)
        sent = 0
        for step in range(steps):
            way = route(permutation(0, step, 8, 8, domain=domain), rows, rank)
            sent += sum(way.send_counts) - way.send_counts[rank]
        assert sent / steps == pytest.approx(rows_leaving(plan, mine), rel=0.02)


def ddp_buckets(ranks: Ranks) -> list[int]:
    """Bytes of DDP's buckets in the order of their reduction, after the first backward has arranged them."""
    layers = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(12)]
    model = ranks.wrap(torch.nn.Sequential(*layers, torch.nn.Linear(1024, 100, bias=False), torch.nn.Linear(100, 10, bias=False)))
    sizes: list[int] = []

    def reduce(_, bucket):
        sizes.append(bucket.buffer().numel() * bucket.buffer().element_size())
        return torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, reduce)
    for _ in range(2):
        model(torch.ones(2, 1024)).sum().backward()
        first, sizes[:] = sizes[:], []
    return first


def test_buckets_are_those_of_ddp(pool):
    sizes = [4 * MIB] * 12 + [409_600, 4_000]
    assert buckets(sizes) == [4_000 + 409_600 + 4 * MIB, 28 * MIB, 16 * MIB]
    assert pool.run(2, ddp_buckets) == [buckets(sizes)] * 2


def test_data_tasks_are_as_many_as_the_data_plane_starts():
    for cpus, ranks in ((24, 8), (3, 4), (1, 4), (248, 8)):
        assert tasks_in_flight(cpus, ranks) == tasks_of_a_rank(cpus, ranks, is_local=False)[0]


def test_the_gradients_and_the_checkpoint_are_the_encoders():
    sizes = gradient_bytes(Recipe.read(ROOT / "jobs" / "moco_v2_imagenet.toml"))
    assert sum(sizes) == 4 * 27_966_656 and len(sizes) == 163


def test_beyond_its_groups_the_recipe_is_another_one_scaled_linearly():
    recipe = Recipe.of_overrides(["schedule.epochs=2", "schedule.warmup_steps=100", "batch.shuffle_domain_groups=8"])
    assert recipe_for(recipe, 8) is recipe
    other = recipe_for(recipe, 32)
    assert (other.batch.global_batch_size, other.batch.groups, other.batch.bn_group_size) == (1024, 32, 32)
    assert other.optimizer.learning_rate == pytest.approx(0.12) and (other.schedule.epochs, other.schedule.warmup_steps) == (2, 25)
    assert other.contrast == recipe.contrast and other.augment == recipe.augment


def test_gpus_are_the_powers_of_two_in_the_range_and_its_end():
    assert gpu_counts("8:1024") == [8, 16, 32, 64, 128, 256, 512, 1024]
    assert gpu_counts("3:20") == [4, 8, 16, 20] and gpu_counts("6") == [6]


V2 = "jobs/moco_v2_imagenet.toml"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--gpus", "many"), "--gpus many: give a range, as 8:1024"),
        (("--gpus", "8:"), "give a range"),
        (("--gpus", "64:8"), "the fewest come first"),
        (("--gpus", "0:8"), "at least 1"),
        (("--gpus", "1:99999"), "at most 16384"),
        (("--gpus", "8", "--workers", "8"), "without --workers"),
        (("--gpus", "8", "--at-step", "0"), "without --workers and --at-step"),
        (("--cluster", "cluster.toml"), "give the range of GPUs"),
        (("--gpus", "8", "--cluster", "absent.toml"), "absent.toml: No such file or directory; infra/cluster_facts.toml is one to copy"),
        (("--gpus", "8", "--cluster", "broken.toml"), "broken.toml is not valid TOML"),
        (("--gpus", "8", "--cluster", "cluster.toml"), "cluster.toml: unknown key 'network.bytes_per_secnd'; the nearest known one is 'network.bytes_per_second'"),
        (("--gpus", "8", "--fact", "gpu.image_per_second=3"), "the command line: unknown key 'gpu.image_per_second'; the nearest known one is 'gpu.images_per_second'"),
        (("--gpus", "8", "--fact", "gpus.images_per_second=3"), "unknown key 'gpus'; the nearest known one is 'gpu'"),
        (("--gpus", "8", "--fact", "node.gpus=0"), "node.gpus = 0: input should be greater than or equal to 1"),
        (("--gpus", "8", "--fact", "node.gpus=eight"), "node.gpus = 'eight'"),
        (("--gpus", "8", "--fact", "168"), "for example gpu.images_per_second=1500"),
    ],
)
def test_mistakes_are_named(words, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.toml").write_text("[gpu\n")
    (tmp_path / "cluster.toml").write_text("[network]\nbytes_per_secnd = 1e9\n")
    assert main(["show-plan", str(ROOT / V2), *words]) == 2
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1


def scale_table(text: str) -> list[list[str]]:
    lines = text.splitlines()
    head = next(number for number, line in enumerate(lines) if line.lstrip().startswith("GPUs"))
    stop = lines.index("", head)
    return [line.split() for line in lines[head + 1 : stop]]


def test_the_table_says_which_rows_are_another_recipe_and_which_cannot_be(capsys):
    words = ("--gpus", "4:100", "--fact", "price.gpu_node=16")
    assert main(["show-plan", str(ROOT / V2), *words, "batch.shuffle_domain_groups=8", "--rows", "9000"]) == 0
    out = capsys.readouterr().out
    rows = scale_table(out)
    assert [(row[0], row[2], row[3]) for row in rows] == [("4", "256", "0.03"), ("8", "256", "0.03"), ("16", "512*", "0.06"), ("32", "1024*", "0.12"), ("64", "2048*", "0.24")]
    assert "* ANOTHER RECIPE, whose accuracy nobody measured" in out
    assert "100 GPUs are left out: 100 GPUs, a BatchNorm group for each: batch.shuffle_domain_groups 8 must be" in " ".join(out.split())
    assert "9,000 rows (--rows)" in out and "NOTHING HERE WAS MEASURED ON A GPU" in out
    given = [line for line in out.splitlines() if line.endswith(" given")]
    assert [line.split()[:2] for line in given] == [["price.gpu_node", "16"]]
    assert "published: MoCo's 200 epochs of ImageNet in 53 hours on 8 V100" in out


def test_too_few_images_for_a_batch_leave_a_row_out(capsys):
    assert main(["show-plan", str(ROOT / V2), "--gpus", "8:1024", "--rows", "20000"]) == 0
    assert "1024 GPUs are left out: the data set has 20000 rows, fewer than batch.global_batch_size 32768" in capsys.readouterr().out


def test_the_file_to_copy_holds_every_fact_at_its_default():
    path = ROOT / "infra" / "cluster_facts.toml"
    assert ClusterFacts.read(path) == ClusterFacts()
    values = tomllib.loads(path.read_text())
    assert [f"{section}.{key}" for section, table in values.items() for key in table] == fact_names()


def test_every_fact_changes_the_prediction():
    """A fact that nothing reads would be one too many."""
    base, work = ["node.gpus=4", "node.cores=5", "data_nodes.most=3", "data_nodes.cores=1"], load(gradients=(5 * MIB, 30 * MIB, MIB))

    def found(*words: str) -> list:
        alone = predict(work, ClusterFacts.read(None, [*base, "data_nodes.most=0", *words]), 8)
        return [alone, *(predict(work, ClusterFacts.read(None, [*base, *words]), gpus) for gpus in (4, 8))]  # one node, and two

    plain, values = found(), ClusterFacts.read(None, base).sources()
    other = {name: 0.01 if value == 0 else value * 2 for name, (value, _) in values.items()}
    other |= {"data_nodes.most": 0, "input.share_from_other_nodes": 0.9, "node.gpus": 2, "node.cores_per_worker": 0.5, "input.storage_bytes_per_second": 1e6, "gpu.backward_share": 0.1}
    told_only_where_too_slow = {"checkpoint.save_bytes_per_second"}
    for name, value in other.items():
        assert (found(f"{name}={value}") != plain) == (name not in told_only_where_too_slow), name
