"""The momentum encoder: θ_k = m·θ_k + (1-m)·θ_q (He et al. 2019, equation 2)."""

import copy

import torch
from torch import Tensor, nn


def key_encoder_of(query_encoder: nn.Module) -> nn.Module:
    """A copy, head included, that no gradient reaches. It belongs in no optimizer.

    It stays in training mode for the whole run: its BatchNorm normalises by batch statistics, and its
    running statistics are its own.
    """
    return copy.deepcopy(query_encoder).requires_grad_(False)


@torch.no_grad()
def follow(key_encoder: nn.Module, query_encoder: nn.Module, m: float, healthy: Tensor | None = None) -> None:
    """One momentum update of every parameter, in place; none if `healthy` (a bool on the device) is false.

    m is the paper's m, 0.999. Written as a lerp by 1-m: for θ_q = 0.50, θ_k = 0.30, m = 0.999 it gives 0.3002.
    """
    keys, queries = list(key_encoder.parameters()), list(query_encoder.parameters())
    if healthy is None:
        torch._foreach_lerp_(keys, queries, 1 - m)
        return
    weight = healthy.to(keys[0].dtype) * (1 - m)
    torch._foreach_lerp_(keys, queries, [weight] * len(keys))
