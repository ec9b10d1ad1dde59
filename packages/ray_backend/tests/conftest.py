"""One cluster for all tests that need Ray: starting it takes longer than they do."""

import os
import signal
import socket
import time

import pytest
import ray
from ray.cluster_utils import Cluster

from kapell.ray_backend import RayBackend, shipping

pytest.register_assert_rewrite("kapell.workergroup.conformance")


@pytest.fixture(scope="session")
def cluster():
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 96, "include_dashboard": False})
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="session")
def backend(cluster):
    with RayBackend(address=cluster.address, log_to_driver=False) as backend:
        backend.start()
        yield backend


@pytest.fixture(scope="module")
def pool(backend):
    with backend.resource_pool([2]) as pool:
        yield pool


@pytest.fixture
def lose_worker():
    def lose(group, rank):
        os.kill(group.processes[rank].pid, signal.SIGKILL)
        deadline = time.monotonic() + 120
        while group.is_alive()[rank] and time.monotonic() < deadline:
            time.sleep(0.05)

    return lose


@pytest.fixture(scope="session")
def wait_until():
    """Waits long: a loaded machine is no failure, and a condition that never holds is one all the same."""

    def wait(condition, seconds=120):
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.05)
        return condition()

    return wait


@pytest.fixture
def deaf_address():
    """An address of this machine where nobody listens and nobody else can."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


@pytest.fixture
def arrived_here(monkeypatch):
    """The bytes that this process has read out of Ray's store."""
    sizes = []
    arrive = shipping._arrive

    def counted(head, private, borrowable, *buffers):
        sizes.append(len(head) + sum(memoryview(buffer).nbytes for buffer in buffers))
        return arrive(head, private, borrowable, *buffers)

    monkeypatch.setattr(shipping, "_arrive", counted)
    return sizes
