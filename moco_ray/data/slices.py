"""Objects of slices, by which one pass of `moco-ray pack` leaves data for the tasks of the next.

An object is slice after slice, then the (slices + 1) little-endian int64 places where they begin, so that a reader of one
slice needs two range reads of an object, whatever its size. Not responsible for what a slice holds (pack_passes.py).
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from moco_ray.data.storage import Store

READ_THREADS = 16  # of a task: a range read from object storage is mostly waiting
BOUNDS_BLOCK = 64  # slices whose places are read at once


@dataclass(frozen=True)
class Parts:
    """The objects that one pass left for the next: of each, one slice is read by range."""

    store: Store
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    slices: int
    of: str  # the job: keeps what was cached of another one with the same names apart

    def read(self, index: int) -> list[bytes]:
        """The given slice of every object."""
        block, inner = divmod(index, BOUNDS_BLOCK)
        bounds = bounds_of(self, block)[:, inner : inner + 2].tolist()

        def one(name: str, bound: list[int]) -> bytes:
            return self.store.read(name, *bound) if bound[0] < bound[1] else b""

        return side_by_side(one, self.names, bounds)


@lru_cache(maxsize=4)
def bounds_of(parts: Parts, block: int) -> np.ndarray:
    """(objects, slices of the block + 1) int64: where slices begin. Kept for the next task of this process."""
    first, stop = block * BOUNDS_BLOCK, min((block + 1) * BOUNDS_BLOCK, parts.slices) + 1

    def one(name: str, size: int) -> np.ndarray:
        table = size - 8 * (parts.slices + 1)
        return np.frombuffer(parts.store.read(name, table + 8 * first, table + 8 * stop), "<i8")

    return np.stack(side_by_side(one, parts.names, parts.sizes))


def joined(slices: list[bytes]) -> bytes:
    return b"".join([*slices, np.cumsum([0, *map(len, slices)]).astype("<i8").tobytes()])


def side_by_side(call: Callable, *items: Iterable) -> list:
    """An ordered map by threads; after an error nobody waits for the rest."""
    with ThreadPoolExecutor(READ_THREADS) as pool:
        try:
            return list(pool.map(call, *items))
        finally:
            pool.shutdown(cancel_futures=True)
