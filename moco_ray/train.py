"""Algorithm 1 of the MoCo paper (He et al. 2019) as one loop.

Encode queries, encode shuffled keys, loss against the queue, check that all is finite before anything
changes, step, momentum update, enqueue. No Ray here: batches come in, and records, checkpoints and
evaluations go out through plain functions. N own rows, B rows of all ranks, C features, K queued keys.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from moco_ray.ahead import Ahead, Slots, View, begin_exchange
from moco_ray.data.batch import BadRow, Batch
from moco_ray.dictionary import Dictionary, Duplicates, Sample
from moco_ray.errors import NonFinite, UserError
from moco_ray.exhibit import Step
from moco_ray.learner import Learner
from moco_ray.method.batchnorm import commit_statistics, forget_statistics
from moco_ray.method.contrast import info_nce
from moco_ray.method.encoder import autocast, working_dtype
from moco_ray.method.momentum import follow
from moco_ray.method.queue import Queue
from moco_ray.method.schedule import learning_rate
from moco_ray.method.shuffle import unshuffle
from moco_ray.parts import Parts
from moco_ray.plan import Plan, passes, rows_of
from moco_ray.ranks import Ranks, UnderWay

MEANS = ("loss", "top1", "top5", "positive_similarity", "negative_similarity", "gradient_norm")


class Outputs(NamedTuple):
    """What the loop hands out. Every rank calls all of them, at the same steps."""

    record: Callable[[dict[str, Any], list[tuple[int, BadRow]]], None]  # scalars, and bad rows with their epoch
    save: Callable[[Learner], None]
    evaluate: Callable[[Learner], dict[str, float]] | None  # None: the checkpoint of that step is evaluated elsewhere
    completed: Callable[[int], bool] = lambda step: False  # after each step: whether to save though none is due
    rows_of_slots: Callable[[Queue], Tensor] | None = None  # K int64: the row of the data set that each queued key is of, or -1
    picture: Callable[[Step], None] = lambda step: None  # of the steps that `is_pictured` names, to be looked at
    parts: Parts | None = None  # told what the step is doing


class Settled(NamedTuple):
    """What is needed to name a step that turns out not to have been finite, when the host comes to look."""

    step: int
    epoch: int
    healthy: Tensor  # bool on the device
    losses: Tensor  # N of each direction
    positions: Tensor  # N
    queue_place: tuple[int, int]


def train(learner: Learner, batches: Iterator[Batch], plan: Plan, ranks: Ranks, outputs: Outputs, overlap: bool = True) -> None:
    """Train from `learner.step` to the plan's last step. `batches` gives this rank's rows of each step.

    `overlap` is for tests and benches: without it nothing is under way while a rank computes, and the numbers are the same to the bit.

    Raises NonFinite on all ranks, with the learner as it was before the step, when a loss or gradient is not
    finite, and UserError when too many images of an epoch could not be read.
    """
    recipe = plan.recipe
    parts = outputs.parts or Parts(ranks.device)
    f_q = ranks.wrap(learner.f_q, recipe.optimizer.gradient_reduction == "bfloat16")
    warm_up(f_q, plan, ranks)
    ahead = Ahead(batches, plan, ranks, parts, overlap)
    healthy = torch.ones((), dtype=torch.bool, device=ranks.device)
    sums, bad, settled = 0.0, [], []  # since the last record
    dictionary, duplicates = Dictionary(plan, ranks, outputs.rows_of_slots), Duplicates()
    seen: list[tuple[int, int]] = []  # content and row, since the last record

    if outputs.evaluate and learner.step and due(learner.step, plan)[1]:  # the checkpoint came first: its evaluation may have been cut off
        evaluate(learner, plan, outputs)
    while learner.step < plan.total_steps:
        step, (batch, queries, slots) = learner.step, ahead.take(learner.step)
        bad += [(batch.epoch, row) for row in batch.bad]
        seen += hashed(batch)
        set_learning_rate(learner.optimizer, learning_rate(plan, step))

        coming = [begin_keys(learner.f_k, one, plan, ranks, parts) for one in slots]  # gathered while queries are encoded
        if not overlap:
            coming = [UnderWay.over(each.wait()) for each in coming]
        losses, scores, q, keys = backward(f_q, queries, coming, learner.queue.keys, plan, ranks, parts)  # keys: B,C each, in row order
        with parts("metrics"):
            if dictionary.samples(step):
                dictionary.keep(sample_of(learner.f_k, keys[0], slots[0], plan, step))
            if dictionary.due(step):
                dictionary.measure(step, q, keys[0], batch.rows, learner.f_q, learner.f_k, learner.queue)
            norm = torch.nn.utils.get_total_norm([p.grad for p in learner.f_q.parameters()])
            scores = torch.cat([ranks.sum(scores) / (plan.keys_per_step), norm[None]])  # MEANS

        # Once a step was not finite nothing changes any more, on the device and without waiting for it.
        healthy = healthy & torch.isfinite(scores[0]) & torch.isfinite(norm)
        place = (learner.queue.position, learner.queue.filled)
        with parts("optimizer"):
            learner.optimizer.found_inf = (~healthy).float()  # SGD(fused) leaves weights and momentum alone at 1
            learner.optimizer.grad_scale = None
            learner.optimizer.step()
            learner.optimizer.zero_grad(set_to_none=True)
        with parts("momentum"):
            follow(learner.f_k, learner.f_q, recipe.contrast.key_momentum, healthy)
        with parts("metrics"):
            if dictionary.due(step):
                dictionary.moved(learner.f_k)
            if is_pictured(step, plan):
                outputs.picture(Step(batch, q, keys[0], rows_of(plan, ranks.world, ranks.rank), learner.queue))
        with parts("enqueue"):
            learner.queue.enqueue(torch.cat(keys), step, healthy)
        with parts("momentum"):  # of the running statistics
            commit_statistics(learner.f_q, healthy)
            commit_statistics(learner.f_k, healthy)

        learner.step += 1
        with parts("metrics"):
            dictionary.leave(learner.step)
            sums = sums + scores
        settled.append(Settled(step, batch.epoch, healthy, losses, batch.positions, place))
        saving, evaluating = due(learner.step, plan)
        saving = outputs.completed(learner.step) or saving
        if learner.step % recipe.run.log_every_steps == 0 or saving:  # only now does the host look
            with parts("metrics"):
                refuse_non_finite(learner, settled, ranks)
                means = dict(zip(MEANS, (sums / len(settled)).tolist(), strict=True)) | dictionary.take()
                everyone = sum(ranks.gather_objects(seen), [])
                if ranks.is_first and everyone:
                    means["duplicate_share"] = duplicates.share(everyone)
                report(learner, means, bad, plan, ranks, outputs)
            sums, bad, settled, seen = 0.0, [], [], []
        if saving:
            learner.average_statistics(ranks, plan.groups)
        if saving:  # before the evaluation: a mistake in that must not cost the steps
            outputs.save(learner)
        if evaluating and outputs.evaluate:
            evaluate(learner, plan, outputs)


def evaluate(learner: Learner, plan: Plan, outputs: Outputs) -> None:
    scalars = {"step": learner.step, "epoch": learner.step / plan.steps_per_epoch}
    outputs.record({**scalars, **outputs.evaluate(learner)}, [])


def encode_keys(f_k: nn.Module, batch: Batch, plan: Plan, ranks: Ranks, draw: tuple[int, int]) -> Tensor:
    """Keys of the whole batch in row order, B,C unit rows, from a shuffled batch; draw = (step, direction). Collective."""
    return begin_keys(f_k, begin_exchange(batch, plan, ranks, draw).wait(), plan, ranks, Parts(ranks.device)).wait()


@torch.no_grad()
def begin_keys(f_k: nn.Module, slots: Slots, plan: Plan, ranks: Ranks, parts: Parts) -> UnderWay[Tensor]:
    """Encode the own slots' crops; under way are the keys of the whole batch in row order, B,C unit rows."""
    keys = []
    for rows in passes(plan, len(slots.view.crops)):
        with parts("augment"):
            x = slots.view.inputs(rows, plan)
        with parts("key forward"):
            keys.append(encode(f_k, x, plan))
    counts = [len(rows_of(plan, ranks.world, rank)) for rank in range(ranks.world)]
    with parts("exchange"):
        return ranks.begin_gather(torch.cat(keys), counts).then(lambda all_slots: unshuffle(all_slots, slots.perm))


def backward(
    f_q: nn.Module, queries: list[View], coming: list[UnderWay[Tensor]], queue: Tensor, plan: Plan, ranks: Ranks, parts: Parts
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Gradients of the mean loss over B rows (summed over directions), averaged over ranks in the last pass.

    `coming` brings the keys B,C of each direction, which see the same queue. Returns the loss of each own row and direction,
    the sums over them of all MEANS but the last, the queries N,C of the first direction, and the keys.
    """
    own = rows_of(plan, ranks.world, ranks.rank)
    keys: list[Tensor] = []
    work = [(d, rows) for d in range(len(coming)) for rows in passes(plan, len(own))]
    losses, scores, found = [], 0.0, []
    for direction, rows in work:
        with parts("augment"):
            x = queries[direction].inputs(rows, plan)
        is_last = (direction, rows) == work[-1]
        with Ranks.reduce_gradients(f_q, now=is_last):
            with parts("query forward"):
                q = encode(f_q, x, plan)  # rows,C
            if direction == len(keys):  # the first pass of it
                with parts("exchange"):
                    keys.append(coming[direction].wait())
            with parts("loss"):
                contrast = info_nce(q, keys[direction][own.start :][rows], queue, plan.recipe.contrast.temperature)
                # The reduction is a mean over ranks; together they make the mean over the batch's B rows.
                loss = contrast.loss.sum() * (ranks.world / plan.recipe.batch.global_batch_size)
            with parts("backward"):
                ranks.backward(loss, lambda: parts.turn("all-reduce")) if is_last else loss.backward()
        with parts("metrics"):
            each = contrast.loss.detach()
            right = [(contrast.rank < top).to(each.dtype) for top in (1, 5)]
            columns = [each, *right, contrast.positive_similarity, contrast.negative_similarity]
            losses.append(each)
            scores = scores + torch.stack([column.sum() for column in columns])
        if direction == 0:
            found.append(q.detach())
    return torch.cat(losses), scores, torch.cat(found), keys


def sample_of(f_k: nn.Module, keys: Tensor, slots: Slots, plan: Plan, step: int) -> Sample:
    """The first key group of a step, on the rank that encoded it, to be encoded once more when its keys leave the queue."""
    n, view = plan.recipe.batch.bn_group_size, slots.view
    kept = View(view.crops[:n].clone(), view.positions[:n].clone(), view.epoch, view.view)

    def again() -> Tensor:
        features = encode(f_k, kept.inputs(slice(0, n), plan), plan)
        forget_statistics(f_k)  # not a pass of the run
        return features

    return Sample(step, again, keys[slots.perm[:n].to(keys.device)])


def hashed(batch: Batch) -> list[tuple[int, int]]:
    """Content and row of those rows of a batch whose bytes are compared."""
    if batch.content is None:
        return []
    chosen = batch.content != 0
    return list(zip(batch.content[chosen].tolist(), batch.rows[chosen].tolist(), strict=True))


def encode(f: nn.Module, x: Tensor, plan: Plan) -> Tensor:
    """Augmented images n,3,H,W -> unit features n,C."""
    with autocast(plan.recipe.encoder, x.device):
        features = f(x)
    return normalize(features.to(working_dtype(plan.recipe.encoder)))


def due(step: int, plan: Plan) -> tuple[bool, bool]:
    """Whether after `step` completed steps a checkpoint and an evaluation are due; with the second the first is too."""
    last, evaluation = step == plan.total_steps, plan.recipe.evaluation
    period = evaluation.every_epochs * plan.steps_per_epoch
    evaluating = bool(evaluation.bank_uri) and (last or (period > 0 and step % period == 0))
    return last or evaluating or step % plan.recipe.run.checkpoint_every_steps == 0, evaluating


def is_pictured(step: int, plan: Plan) -> bool:
    """Whether step 0, 1, .. is looked at: every `run.images_every_steps`th, the first that meets a queue full of the run's own keys (before
    it, hardest negatives may be noise, which no image shows), and the last.
    """
    every, full_at = plan.recipe.run.images_every_steps, -(-plan.recipe.contrast.queue_keys // plan.keys_per_step)
    return every > 0 and (step % every == 0 or step in (full_at, plan.total_steps - 1))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def warm_up(f_q: nn.Module, plan: Plan, ranks: Ranks) -> None:
    """One pass that teaches DDP its bucket order, before step 0 and after every restore.

    DDP rebuilds its buckets after the first backward, which changes the order of sums: without this pass a
    restored run would differ in the last bits from one that never stopped.
    """
    if ranks.world == 1:
        return
    settings, pixels = plan.recipe.encoder, plan.recipe.augment.image_pixels
    x = torch.zeros(
        plan.recipe.batch.bn_group_size, 3, pixels, pixels, device=ranks.device, dtype=working_dtype(settings)
    )
    with autocast(settings, ranks.device):
        (f_q(x).sum() * 0).backward()
    f_q.zero_grad(set_to_none=True)
    forget_statistics(f_q)


def refuse_non_finite(learner: Learner, settled: list[Settled], ranks: Ranks) -> None:
    """Raise NonFinite on all ranks if one of these steps was not finite, with the learner set back to before it.

    Waits for the device. The first such step gated all that came after it.
    """
    if not settled or bool(settled[-1].healthy):
        return
    failed = next(step for step in settled if not bool(step.healthy))
    learner.step = failed.step
    learner.queue.position, learner.queue.filled = failed.queue_place
    wrong = ~torch.isfinite(failed.losses.view(-1, len(failed.positions))).all(0).cpu()
    positions = sum(ranks.gather_objects(failed.positions.cpu()[wrong].tolist()), [])
    where = f"rows at positions {_shorten(positions)}" if positions else "all losses were finite, the gradient was not"
    raise NonFinite(
        f"step {failed.step} (epoch {failed.epoch}) gave a loss or gradient that is not finite; {where}. Nothing was "
        "changed by it, nor by a step after it. Start a new run with a lower optimizer.learning_rate or a longer "
        "schedule.warmup_steps"
    )


def report(
    learner: Learner, means: dict[str, float], bad: list[tuple[int, BadRow]], plan: Plan, ranks: Ranks, outputs: Outputs
) -> None:
    """Hand out the means since the last record, and judge the bad rows of the epoch. Collective."""
    bad = sorted(sum(ranks.gather_objects(bad), []))
    worst = (0, 0)  # bad rows and their epoch: a record may span the end of one
    for epoch, _ in bad:
        learner.bad_rows = learner.bad_rows + 1 if epoch == learner.bad_epoch else 1
        learner.bad_epoch = epoch
        worst = max(worst, (learner.bad_rows, epoch))
    entry = {
        "step": learner.step,
        "epoch": learner.step / plan.steps_per_epoch,
        "chance_loss": plan.chance_loss,
        "learning_rate": learner.optimizer.param_groups[0]["lr"],
        "queue_fill": learner.queue.fill,
        "bad_rows": learner.bad_rows if learner.bad_epoch == (learner.step - 1) // plan.steps_per_epoch else 0,
        **means,
    }
    outputs.record(entry, bad)
    allowed = int(plan.recipe.data.max_bad_rows_fraction * plan.steps_per_epoch * plan.recipe.batch.global_batch_size)
    if worst[0] > allowed:
        raise UserError(
            f"{worst[0]} images of epoch {worst[1]} could not be read, more than the {allowed} that "
            f"data.max_bad_rows_fraction {plan.recipe.data.max_bad_rows_fraction} allows; the last is {bad[-1][1].source} "
            f"({bad[-1][1].kind}). See quarantine.jsonl in the run folder; raise the fraction and resume, or mend the data and start a new run"
        )


def _shorten(positions: list[int]) -> str:
    shown = ", ".join(map(str, positions[:8]))
    return f"{shown} and {len(positions) - 8} more" if len(positions) > 8 else shown
