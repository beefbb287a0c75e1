import os
import tempfile

import pytest
import torch

from tests.ranks_pool import RanksPool

# Manifests are kept in the user's cache: tests, and the processes they start, have one of their own.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="moco-ray-cache-")


@pytest.fixture(scope="session")
def pool():
    """Four gloo ranks for the whole test session."""
    ranks = RanksPool(4)
    yield ranks
    ranks.close()


@pytest.fixture(autouse=True)
def _few_threads():
    torch.set_num_threads(2)
