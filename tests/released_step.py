"""A step of the released MoCo, written down anew from what it does: what ours is equal to in float64, and measured against.

Responsible for its parts in its order: everything gathered, one queue C,K as a buffer of the module in DDP, logits of all keys at
once, float32 images. No line is copied, and nothing is made slower than it is there: it differs in that the permutation may be given.
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F


@torch.no_grad()
def momentum(keys: Iterable[nn.Parameter], queries: Iterable[nn.Parameter], m: float) -> None:
    """θ_k = m·θ_k + (1-m)·θ_q, a new tensor for each parameter."""
    for k, q in zip(keys, queries, strict=True):
        k.data = k.data * m + q.data * (1.0 - m)


def logits_of(q: Tensor, k: Tensor, queue: Tensor, temperature: float) -> Tensor:
    """q and k N,C, `queue` C,K: N,1+K, the positive first."""
    positive = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
    negative = torch.einsum("nc,ck->nk", [q, queue.clone().detach()])
    logits = torch.cat([positive, negative], dim=1)
    logits /= temperature
    return logits


def loss_of(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device))


@torch.no_grad()
def right_of(logits: Tensor) -> list[Tensor]:
    """Rows whose positive is among the first 1 and 5: it is computed at each step there too."""
    _, first = logits.topk(min(5, logits.shape[1]), 1, True, True)
    right = first.t().eq(0)
    return [right[:k].reshape(-1).float().sum(0) for k in (1, 5)]


@torch.no_grad()
def enqueue(queue: Tensor, pointer: Tensor, keys: Tensor) -> None:
    """`keys` B,C into `queue` C,K, in place; K must be a multiple of B."""
    at = int(pointer)
    assert queue.shape[1] % len(keys) == 0
    queue[:, at : at + len(keys)] = keys.T
    pointer[0] = (at + len(keys)) % queue.shape[1]


@torch.no_grad()
def gather(rows: Tensor) -> Tensor:
    """Rows of all ranks, on every rank."""
    parts = [torch.ones_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows, async_op=False)
    return torch.cat(parts, dim=0)


@torch.no_grad()
def shuffled(images: Tensor, draw: Callable[[int], Tensor]) -> tuple[Tensor, Tensor]:
    """This rank's share of all ranks' images in a new order, and the order back. Rank 0's permutation counts."""
    everything = gather(images)
    order = draw(len(everything))
    dist.broadcast(order, src=0)
    back = torch.argsort(order)
    mine = order.view(dist.get_world_size(), -1)[dist.get_rank()]
    return everything[mine], back


@torch.no_grad()
def unshuffled(keys: Tensor, back: Tensor) -> Tensor:
    """This rank's own keys."""
    return gather(keys)[back.view(dist.get_world_size(), -1)[dist.get_rank()]]


class Released(nn.Module):
    """Both encoders and the queue in one module, to be wrapped in DDP, which sends the queue with each forward as a buffer."""

    def __init__(self, encoder_q: nn.Module, encoder_k: nn.Module, queue: Tensor, m: float, temperature: float):
        """`queue` is C,K; the encoders are equal at first."""
        super().__init__()
        self.encoder_q, self.encoder_k, self.m, self.temperature = encoder_q, encoder_k.requires_grad_(False), m, temperature
        self.draw: Callable[[int], Tensor] = torch.randperm
        self.register_buffer("queue", queue)
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, im_q: Tensor, im_k: Tensor) -> Tensor:
        """N,1+K logits; the keys of all ranks are in the queue afterwards."""
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            momentum(self.encoder_k.parameters(), self.encoder_q.parameters(), self.m)
            mixed, back = shuffled(im_k, self.draw)
            k = unshuffled(F.normalize(self.encoder_k(mixed), dim=1), back)
        logits = logits_of(q, k, self.queue, self.temperature)
        enqueue(self.queue, self.queue_ptr, gather(k))
        return logits


def released_step(model: nn.Module, optimizer: torch.optim.Optimizer, im_q: Tensor, im_k: Tensor) -> float:
    """One step of the wrapped module; the loss of this rank's rows."""
    logits = model(im_q, im_k)
    loss = loss_of(logits)
    right_of(logits)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()
