"""The dictionary as a queue: the newest keys enter, the oldest leave (He et al. 2019, section 3.2).

Replicated on every rank and part of the checkpoint. Not a module and not in DDP: the released code sends
its queue with every forward pass because it is a buffer there.
"""

from typing import Any

import torch
from torch import Tensor

EMPTY = -1  # the step of a slot that no key has filled yet


class Queue:
    """`keys` K,C, unit rows, and `steps` K int64: the step that made each key, EMPTY where none has.

    Takes any number of keys at any position. Empty slots hold random unit vectors, as in the paper's
    code: until the queue is full, loss and accuracy look better than they are.
    """

    VERSION = 1

    def __init__(self, size: int, feature_dim: int, seed: int, device: torch.device | str = "cpu", dtype=torch.float32):
        draw = torch.Generator().manual_seed(seed)
        noise = torch.randn(size, feature_dim, generator=draw)  # K,C float32 whatever the dtype
        self.keys = torch.nn.functional.normalize(noise, out=noise).to(device, dtype)  # in place: four million keys are 2 GB
        self.steps = torch.full((size,), EMPTY, dtype=torch.int64, device=device)
        self.position = 0  # where the next key goes
        self.filled = 0

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def fill(self) -> float:
        """Share of the slots that hold a key, 0 to 1."""
        return self.filled / len(self)

    @torch.no_grad()
    def enqueue(self, keys: Tensor, step: int, healthy: Tensor | None = None) -> None:
        """Let `keys` (N,C, any N) in, oldest slots first; of more than K keys the last K stay.

        With `healthy` (a bool on the device) false no slot changes, and the caller stops the run: the
        position is the host's and has moved.
        """
        size = len(self)
        skipped = max(0, len(keys) - size)
        keys, start = keys[skipped:], (self.position + skipped) % size
        before_wrap = min(len(keys), size - start)
        self._write(slice(start, start + before_wrap), keys[:before_wrap], step, healthy)
        self._write(slice(0, len(keys) - before_wrap), keys[before_wrap:], step, healthy)
        self.position = (start + len(keys)) % size
        self.filled = min(size, self.filled + len(keys))

    def _write(self, slots: slice, keys: Tensor, step: int, healthy: Tensor | None) -> None:
        if healthy is not None:
            keys = torch.where(healthy, keys, self.keys[slots])
            step = torch.where(healthy, step, self.steps[slots])
        self.keys[slots] = keys
        self.steps[slots] = step

    def fingerprint(self) -> Tensor:
        """Four int64 on the device: equal queues give equal ones, and a single changed bit another.

        Sums of the keys' bit patterns, plain and weighted by slot, of the steps, and the position.
        """
        whole = self.keys.shape[1] * self.keys.element_size() % 8 == 0  # then in words of 64 bits, which need no conversion
        rows = self.keys.view(torch.int64 if whole else torch.int32).sum(1, dtype=torch.int64)  # K
        slot = torch.arange(1, len(self) + 1, device=rows.device)
        return torch.stack([rows.sum(), (rows * slot).sum(), (self.steps * slot).sum(), slot.new_tensor(self.position)])

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": self.VERSION,
            "keys": self.keys,
            "steps": self.steps,
            "position": self.position,
            "filled": self.filled,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state of the same version and shape. Raises ValueError otherwise, unchanged."""
        if state.get("version") != self.VERSION:
            raise ValueError(f"queue state of version {state.get('version')!r}; this release reads {self.VERSION}")
        if state["keys"].shape != self.keys.shape:
            raise ValueError(f"queue of shape {tuple(state['keys'].shape)}, not {tuple(self.keys.shape)}")
        self.keys.copy_(state["keys"])
        self.steps.copy_(state["steps"])
        self.position, self.filled = int(state["position"]), int(state["filled"])
