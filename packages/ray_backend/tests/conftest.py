"""One Ray session for all tests that need one: starting it takes longer than they do."""

import pytest
import ray

from kapell.ray_backend import RayBackend


@pytest.fixture(scope="session")
def backend():
    with RayBackend(num_cpus=8, log_to_driver=False) as backend:
        backend.start()
        yield backend


@pytest.fixture(scope="module")
def pool(backend):
    pool = backend.resource_pool([2])
    yield pool
    if ray.is_initialized():
        pool.close()
