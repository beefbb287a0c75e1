"""All labels of a data set at once, without its images.

Responsible for reading them side by side. Not responsible for what a label is in each layout (shards.py).
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from moco_ray.data.shards import Manifest, read_chunk_labels

THREADS = 16  # most of the time is waiting for a storage


def read_labels(manifest: Manifest, label_column: str) -> np.ndarray:
    """Row number -> label, (rows,) int64. Tars are read whole for it. Raises UserError if one is missing or no integer."""
    with ThreadPoolExecutor(THREADS) as threads:
        found = threads.map(lambda chunk: read_chunk_labels(manifest, chunk, label_column), range(len(manifest.chunk_rows)))
        return np.concatenate([np.zeros(0, np.int64), *found])
