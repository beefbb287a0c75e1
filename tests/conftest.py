import os
import tempfile

import pytest
import torch

from tests.object_stores import NO_SERVER, forget, moto_server, rclone_server
from tests.ranks_pool import RanksPool

# Manifests are kept in the user's cache: tests, and the processes they start, have one of their own.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="moco-ray-cache-")


@pytest.fixture(scope="session")
def pool():
    """Four gloo ranks for the whole test session."""
    ranks = RanksPool(4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def rclone(tmp_path_factory):
    """A real S3 server that ignores conditions."""
    with rclone_server(tmp_path_factory.mktemp("buckets")) as server:
        yield server


@pytest.fixture(scope="session")
def moto():
    """A real S3 server with authentication, and with conditional writes."""
    with moto_server() as server:
        yield server


@pytest.fixture
def no_aws(monkeypatch):
    """No AWS setting of this machine counts, and no filesystem is open before the test or after it."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in NO_SERVER.items():
        monkeypatch.setenv(name, value)
    forget()
    yield
    forget()


@pytest.fixture(autouse=True)
def _few_threads():
    torch.set_num_threads(2)
