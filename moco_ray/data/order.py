"""The order of an epoch: which rows make a step, as a pure function of (rows of the chunks, plan, seed, epoch).

Responsible for the permutation, for what an epoch leaves out, and for the positions of rows. It knows neither files
nor ranks: row numbers are the manifest's, and a world size cannot change them. Not responsible for reading
(shards.py) nor for who reads what (stream.py).

The order of one epoch (R rows, B rows a step, n rows a BN group, G = B / n groups, S = R // B steps):

1. permute the chunks and lay their rows end to end; keep the first S*B of them, so the R mod B rows that an epoch
   drops lie in its last chunks, which are others every epoch. The chunk that the cut goes through begins at a row drawn
   anew and goes on from its own first row after its last: otherwise a data set of few chunks would never show the
   rows at their ends;
2. cut into G streams of S*n rows, one for each BN group;
3. cut a stream into windows of `plan.window_steps` * n rows (the last may be shorter) and permute the rows within
   each; the stream gives its next n rows to each step.

So a window reads a few whole chunks, and rows mix within a window only. This is weaker than a permutation of all
rows, which the released code draws: rows of one chunk stay near each other in time. Packed shards (shuffled when
packed) and trees (a chunk is one file, so step 1 is a full permutation) lose nothing by it.
"""

import numpy as np

from moco_ray.plan import Plan

VERSION = 2  # of the rules below: a run goes on under those it began with
CHUNK_ORDER, WINDOW_ORDER, CUT_CHUNK = 101, 102, 103  # tags that keep the draws of this module apart from any others of the seed


class EpochOrder:
    """The rows of every step of one epoch. Holds arrays as long as the chunks and one window, never all rows."""

    def __init__(self, chunk_rows: np.ndarray, plan: Plan, seed: int, epoch: int):
        """`chunk_rows` (chunks,) int64: rows of each chunk in the manifest's order; they must sum to plan.rows."""
        first_row = np.concatenate([[0], np.cumsum(chunk_rows, dtype=np.int64)])
        if first_row[-1] != plan.rows:
            raise ValueError(f"the chunks hold {first_row[-1]} rows and the plan {plan.rows}: make the plan from them")
        self.seed, self.epoch = seed, epoch
        self.steps = plan.steps_per_epoch
        self.groups, self.window_steps = plan.groups, plan.window_steps
        self.group_rows = plan.recipe.batch.bn_group_size
        order = np.random.default_rng([seed, CHUNK_ORDER, epoch]).permutation(len(chunk_rows))
        self._chunk_first_row = first_row[order]  # in the order of the epoch
        self._laid_ends = np.cumsum(np.asarray(chunk_rows, dtype=np.int64)[order])
        kept = min(self.steps * plan.recipe.batch.global_batch_size, plan.rows - 1)
        self._cut = int(np.searchsorted(self._laid_ends, kept, side="right"))  # the chunk that the cut goes through
        self._cut_rows = int(chunk_rows[order[self._cut]])
        self._turn = int(np.random.default_rng([seed, CUT_CHUNK, epoch]).integers(self._cut_rows))
        self._cached_window: tuple[tuple[int, int], np.ndarray] | None = None

    @property
    def windows(self) -> int:
        """Windows of a stream."""
        return -(-self.steps // self.window_steps)

    def window_of(self, step: int) -> int:
        """The window that holds `step` (counted within the epoch)."""
        return step // self.window_steps

    def window_rows(self, group: int, window: int) -> np.ndarray:
        """(rows of the window,) int64 manifest row numbers, in the order in which they are given to steps."""
        if not (0 <= group < self.groups and 0 <= window < self.windows):
            raise IndexError(f"group {group}, window {window}: there are {self.groups} groups, {self.windows} windows")
        if self._cached_window is None or self._cached_window[0] != (group, window):
            first = window * self.window_steps
            last = min(first + self.window_steps, self.steps)
            stream = group * self.steps * self.group_rows
            laid = np.arange(stream + first * self.group_rows, stream + last * self.group_rows)
            draws = np.random.default_rng([self.seed, WINDOW_ORDER, self.epoch, group, window])
            rows = self._rows_at(laid)[draws.permutation(len(laid))]
            self._cached_window = (group, window), rows
        return self._cached_window[1]

    def rows_of(self, step: int, group: int) -> np.ndarray:
        """(n,) int64 manifest row numbers of BN group `group` at `step`, counted within the epoch."""
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step}: the epoch has {self.steps} steps")
        window = self.window_of(step)
        first = (step - window * self.window_steps) * self.group_rows
        return self.window_rows(group, window)[first : first + self.group_rows]

    def positions_of(self, step: int, group: int) -> np.ndarray:
        """(n,) int64 positions in the epoch of the rows that `rows_of` gives: step*B + group*n + j."""
        first = (step * self.groups + group) * self.group_rows
        return np.arange(first, first + self.group_rows)

    def _rows_at(self, laid: np.ndarray) -> np.ndarray:
        """Manifest row numbers at these places of the rows laid end to end."""
        chunk = np.searchsorted(self._laid_ends, laid, side="right")
        # chunks without rows end where they start: side="right" steps over them
        starts = np.concatenate([[0], self._laid_ends])[chunk]
        inner = laid - starts
        cut = chunk == self._cut
        inner[cut] = (inner[cut] + self._turn) % self._cut_rows
        return self._chunk_first_row[chunk] + inner
