import pytest

from kapell.workergroup import LocalBackend
from kapell.workergroup.conformance import *  # noqa: F403


@pytest.fixture(scope="module")
def backend():
    with LocalBackend("threads") as backend:
        yield backend


@pytest.fixture
def lose_worker():
    return lambda group, rank: group.lose(rank)
