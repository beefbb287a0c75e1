"""InfoNCE of a query against its own key and all queued keys (He et al. 2019, equation 1)."""

from typing import NamedTuple

import torch
from torch import Tensor

LOWEST_PLAIN_TEMPERATURE = 0.03  # from here on exp of every logit, of -1/T to 1/T, is a float32 number, and so are their sums
CORE_LOGITS, DEVICE_LOGITS = 2**15, 2**24  # that exist at a time: 128 kB stay in a core's cache with their keys; 64 MB are few launches
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
        scaled = q / temperature
        columns = scaled.T.contiguous()  # C,N: the product takes up to half as long again where they lie otherwise
        positive = (scaled * k).sum(1)  # N
        rising = temperature < LOWEST_PLAIN_TEMPERATURE
        peak = positive.clone() if rising else torch.zeros_like(positive)  # N: what is subtracted from all logits
        own = (positive - peak).exp()  # N
        total, pull = own.clone(), k * own[:, None]  # N; N,C: sum of softmax weight times key
        tie = positive - 8 * torch.finfo(dtype).eps / temperature  # N; equal keys differ by rounding alone
        rank, negative = torch.zeros_like(positive), torch.zeros_like(positive)
        size = chunk_keys(len(q), q.device)
        held = [q.new_empty(min(size, len(queue)), len(q)) for _ in range(2)]
        for keys in queue.split(size):
            # One column a query: a chunk is then the product's large side, whose rows lie as they are read.
            logits, beaten = (one[: len(keys)] for one in held)  # chunk,N
            torch.mm(keys.to(dtype), columns, out=logits)
            rank += torch.ge(logits, tie, out=beaten).sum(0)  # in floats: a comparison to bool takes thrice the time
            negative += logits.sum(0)
            if rising:
                higher = torch.maximum(peak, logits.amax(0))
                shrink, peak = (peak - higher).exp(), higher
                total, pull = total * shrink, pull * shrink[:, None]
                logits -= peak
            weights = logits.exp_()
            total += weights.sum(0)
            pull.addmm_(weights.T, keys.to(dtype))
        ctx.save_for_backward(((pull / total[:, None] - k) / temperature).to(given))
        similarity, negative = positive * temperature, negative * (temperature / len(queue))
        rank = rank.long()
        ctx.mark_non_differentiable(rank, similarity, negative)
        return total.log() + peak - positive, rank, similarity, negative

    @staticmethod
    def backward(ctx, loss_gradient, *_):
        (gradient,) = ctx.saved_tensors
        return gradient * loss_gradient[:, None].to(gradient.dtype), None, None, None
