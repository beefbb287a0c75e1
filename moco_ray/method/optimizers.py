"""The optimizers of the query encoder: SGD as released, LARS for large batches, AdamW.

Responsible for which parameters decay and for LARS itself. All three can skip a step by a flag on the device, `found_inf`
(see train.py), because the update is one fused kernel that reads it. Not here: the learning rate, which schedule.py gives
each step.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from moco_ray import recipe

TRUST = 0.001  # η of You et al. 2017, and of SimCLR, BYOL and MoCo v3 since


class LARS(torch.optim.Optimizer):
    """Layer-wise adaptive rate scaling (You et al. 2017, https://arxiv.org/abs/1708.03888, algorithm 1), fused.

    Of each tensor w with gradient g: v = m·v + λ·(g + β·w), w = w - lr·v, where λ = η·|w| / (|g| + β·|w|), and 1 where
    a norm is 0 (the paper leaves that open; biases begin at 0). In a group with `adapt` false λ is 1: SimCLR, BYOL and
    MoCo v3 treat norms and biases so. The rate stands outside of v, as in torch's SGD and in these three: where the
    paper has it inside, a new rate would take effect over the next 1/(1-m) steps only.
    """

    def __init__(self, groups: Iterable[dict], lr: float, momentum: float):
        """Groups hold `params`, `weight_decay` and `adapt`."""
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0, "adapt": True})

    @torch.no_grad()
    def step(self) -> None:
        """One update of all parameters that have a gradient; none if `found_inf`, a float on the device, is 1."""
        for group in self.param_groups:
            weights = [w for w in group["params"] if w.grad is not None]
            if not weights:
                continue
            directions = torch._foreach_add([w.grad for w in weights], weights, alpha=group["weight_decay"])
            if group["adapt"]:
                torch._foreach_mul_(directions, list(_trust_ratios(weights, group["weight_decay"]).unbind()))
            for w in weights:
                if "momentum_buffer" not in self.state[w]:
                    self.state[w]["momentum_buffer"] = torch.zeros_like(w)
            buffers: list[Tensor | None] = [self.state[w]["momentum_buffer"] for w in weights]
            sgd(
                weights, directions, buffers, fused=True, lr=group["lr"], momentum=group["momentum"], weight_decay=0.0,
                found_inf=getattr(self, "found_inf", None), dampening=0.0, nesterov=False, maximize=False,
            )  # fmt: skip


def _trust_ratios(weights: list[Tensor], decay: float) -> Tensor:
    """λ of each tensor, on the device."""
    size = torch.stack(torch._foreach_norm(weights))
    pull = torch.stack(torch._foreach_norm([w.grad for w in weights])) + decay * size
    return torch.where((size > 0) & (pull > 0), TRUST * size / pull, 1.0)


def build_optimizer(encoder: nn.Module, settings: recipe.Optimizer) -> torch.optim.Optimizer:
    """The recipe's optimizer of all parameters of an encoder; its state is empty before the first step."""
    parameters = list(encoder.parameters())
    decaying = [{"params": parameters, "weight_decay": settings.weight_decay}]
    if not settings.decay_norm_and_bias:
        plain = {id(p) for p in parameters if p.ndim <= 1}
        decaying[0]["params"] = [p for p in parameters if id(p) not in plain]
        decaying.append({"params": [p for p in parameters if id(p) in plain], "weight_decay": 0.0})
    rate, momentum = settings.learning_rate, settings.sgd_momentum
    if settings.name == "lars":
        return LARS([{**group, "adapt": number == 0} for number, group in enumerate(decaying)], rate, momentum)
    if settings.name == "adamw":
        return torch.optim.AdamW(decaying, lr=rate, fused=True)  # betas 0.9 and 0.999, as in MoCo v3
    return torch.optim.SGD(decaying, lr=rate, momentum=momentum, fused=True)

