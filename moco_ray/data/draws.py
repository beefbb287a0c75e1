"""The random numbers of the data plane: a pure function of what they are for.

Responsible for uniform draws keyed by (seed, epoch, position, view, stage), so that a retried task, a
restored run or another world size draws the same. Not responsible for what the draws mean (see decode.py
and augment.py), nor for the order of an epoch and the shuffle of the keys, which have generators of their own.
"""

import numpy as np

# Stages: each has a stream of its own, so that a change to one leaves the draws of the others alone.
CROP = 0
COLOUR = 1
REPLACE = 2  # which row stands in for a bad one
PACK = 3  # where a row goes in a packed data set


def uniforms(seed: int, epoch: int, positions: np.ndarray, view: int, stage: int, count: int) -> np.ndarray:
    """`count` independent uniforms in [0, 1) for each position: N,count float64, 53 random bits each.

    `positions` (N, int64) are positions in the epoch, `view` is 0 for the query's view and 1 for the key's.
    Row j depends on (seed, epoch, positions[j], view, stage) alone, and a larger `count` only appends.
    Philox 4x64 (Salmon et al. 2011) is keyed by (seed, epoch); (stage, position, view) are the upper words
    of its counter, and the draws count up the lowest one, so that no two streams overlap.
    Raises ValueError where a number is negative. Costs about 5 us a row (one core of a Zen 4 VM).
    """
    positions = np.asarray(positions, dtype=np.int64)
    if min(seed, epoch, view, stage, positions.min(initial=0)) < 0:
        raise ValueError(
            f"draws are keyed by numbers >= 0, not by seed {seed}, epoch {epoch}, view {view}, stage {stage} and "
            f"positions from {positions.min(initial=0)}; count positions from the start of the epoch"
        )
    counters = np.zeros((len(positions), 4), dtype=np.uint64)
    counters[:, 1], counters[:, 2], counters[:, 3] = stage, positions, view
    generator = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64))
    state = generator.state  # of a fresh generator: nothing buffered
    raw = np.empty((len(positions), count), dtype=np.uint64)
    for row, counter in enumerate(counters):  # setting the state costs a sixth of making a generator
        state["state"]["counter"] = counter
        generator.state = state
        raw[row] = generator.random_raw(count)
    return (raw >> np.uint64(11)) * 2.0**-53
