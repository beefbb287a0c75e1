import pytest
import torch

from tests.ranks_pool import RanksPool


@pytest.fixture(scope="session")
def pool():
    """Four gloo ranks for the whole test session."""
    ranks = RanksPool(4)
    yield ranks
    ranks.close()


@pytest.fixture(autouse=True)
def _few_threads():
    torch.set_num_threads(2)
