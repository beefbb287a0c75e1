"""InfoNCE of a query against its own key and all queued keys (He et al. 2019, equation 1)."""

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_KEYS = 4096  # queue rows whose logits exist at a time


class Contrast(NamedTuple):
    """Per row; only `loss` carries a gradient (to q)."""

    loss: Tensor  # N: -log softmax of the positive among K+1
    rank: Tensor  # N int64: queued keys at least as similar as the own key; 0 is a right choice
    positive_similarity: Tensor  # N: cosine of q and its key
    negative_similarity: Tensor  # N: mean cosine of q and the queued keys


def info_nce(q: Tensor, k: Tensor, queue: Tensor, temperature: float) -> Contrast:
    """q and k are N,C unit rows, `queue` K,C unit rows; temperature >= 0.03.

    Exact, in chunks of the queue, so that N,K logits never exist at once. Since all rows are unit vectors no
    logit exceeds 1/T, which therefore serves as the softmax's maximum. The gradient is saved in forward
    instead of the queue, so the queue may change before backward: it needs no copy (the released code clones
    it every step). A tie counts against the query: a collapsed encoder must not look right.
    """
    return Contrast(*_QueueNCE.apply(q, k, queue, temperature))


class _QueueNCE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, queue, temperature):
        scaled, top = q / temperature, 1.0 / temperature
        positive = (scaled * k).sum(1)  # N
        own = (positive - top).exp()  # N
        total, pull = own.clone(), k * own[:, None]  # N; N,C: sum of softmax weight times key
        tie = (positive - 8 * torch.finfo(q.dtype).eps * top)[:, None]  # equal keys differ by rounding alone
        rank = torch.zeros(len(q), dtype=torch.int64, device=q.device)
        for keys in queue.split(CHUNK_KEYS):
            logits = scaled @ keys.T  # N,chunk
            rank += (logits >= tie).sum(1)
            weights = logits.sub_(top).exp_()
            total += weights.sum(1)
            pull.addmm_(weights, keys)
        ctx.save_for_backward((pull / total[:, None] - k) / temperature)
        similarity, negative = positive * temperature, q @ queue.mean(0)
        ctx.mark_non_differentiable(rank, similarity, negative)
        return total.log() + top - positive, rank, similarity, negative

    @staticmethod
    def backward(ctx, loss_gradient, *_):
        (gradient,) = ctx.saved_tensors
        return gradient * loss_gradient[:, None], None, None, None
