"""InfoNCE of a query against its own key and all queued keys (He et al. 2019, equation 1)."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from moco_ray.method.products import product

LOG2_E = math.log2(math.e)
LOWEST_PLAIN_TEMPERATURE = 0.03  # from here on exp of every logit, of -1/T to 1/T, is a float32 number, and so are their sums
CORE_LOGITS, DEVICE_LOGITS = 2**16, 2**24  # that exist at a time: 256 kB a core stay in its cache; 64 MB are few launches
FEWEST_KEYS = 512  # of a chunk, however many the queries


class Contrast(NamedTuple):
    """Per row; only `loss` carries a gradient (to q)."""

    loss: Tensor  # N: -log softmax of the positive among K+1
    rank: Tensor  # N int64: queued keys at least as similar as the own key, counted up to 2^24 in float32; 0 is a right choice
    positive_similarity: Tensor  # N: cosine of q and its key
    negative_similarity: Tensor  # N: mean cosine of q and the queued keys


def info_nce(q: Tensor, k: Tensor, queue: Tensor, temperature: float) -> Contrast:
    """q and k are N,C unit rows, `queue` K,C unit rows; any temperature above 0.

    Exact, in chunks of the queue: N,K logits never exist at once, and memory does not grow with K. All is summed in
    float32 at least, whatever the dtypes that come in; the gradient has q's. Since all rows are unit vectors no logit
    exceeds 1/T, so that exp of it needs no maximum subtracted; below T = 0.03, where it could overflow or all could
    vanish, the greatest logit so far is. The gradient is saved in forward instead of the queue, so the queue may change
    before backward: it needs no copy (the released code clones it every step). A tie counts against the query: a
    collapsed encoder must not look right.
    """
    return Contrast(*_QueueNCE.apply(q, k, queue, temperature))


def chunk_keys(rows: int, device: torch.device) -> int:
    """Queue rows whose logits with `rows` queries exist at a time."""
    logits = CORE_LOGITS * torch.get_num_threads() if device.type == "cpu" else DEVICE_LOGITS
    return max(FEWEST_KEYS, logits // max(1, rows))


class _QueueNCE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, queue, temperature):
        given, dtype = q.dtype, torch.promote_types(q.dtype, torch.float32)
        q, k = q.to(dtype), k.to(dtype)
        scaled = q * (LOG2_E / temperature)  # logits in base 2, whose powers cost a quarter
        positive = (scaled * k).sum(1)  # N
        rising = temperature < LOWEST_PLAIN_TEMPERATURE
        peak = positive.clone() if rising else torch.zeros_like(positive)  # N: what is subtracted from all logits
        own = (positive - peak).exp2()  # N
        total, pull = own.clone(), k * own[:, None]  # N; N,C: sum of softmax weight times key
        tie = (positive - 8 * torch.finfo(dtype).eps * LOG2_E / temperature)[:, None]  # N,1; equal keys differ by rounding alone
        rank, negative = torch.zeros_like(positive), torch.zeros_like(positive)
        size = chunk_keys(len(q), q.device)
        beaten = q.new_empty(len(q), min(size, len(queue)))
        for keys in queue.split(size):
            keys = keys.to(dtype)
            logits = product(scaled, keys)  # N,chunk
            rank += torch.ge(logits, tie, out=beaten[:, : len(keys)]).sum(1)  # in floats: a comparison to bool takes many times as long
            negative += logits.sum(1)
            if rising:
                higher = torch.maximum(peak, logits.amax(1))
                shrink, peak = (peak - higher).exp2(), higher
                total, pull = total * shrink, pull * shrink[:, None]
                logits -= peak[:, None]
            weights = logits.exp2_()
            total += weights.sum(1)
            pull += product(weights, keys.T)
        ctx.save_for_backward(((pull / total[:, None] - k) / temperature).to(given))
        similarity, negative = positive * (temperature / LOG2_E), negative * (temperature / LOG2_E / len(queue))
        rank = rank.long()
        ctx.mark_non_differentiable(rank, similarity, negative)
        return (total.log2() + peak - positive) / LOG2_E, rank, similarity, negative

    @staticmethod
    def backward(ctx, loss_gradient, *_):
        (gradient,) = ctx.saved_tensors
        return gradient * loss_gradient[:, None].to(gradient.dtype), None, None, None
