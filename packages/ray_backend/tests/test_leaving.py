"""A program that ends, in whatever way, leaves no actor, no reservation, no process and no shared memory."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import ray

PROGRAM = """
import os, sys, time
from kapell.decorators import Dispatch, register
from kapell.ray_backend import RayBackend
from kapell.workergroup import ClassWithInitArgs, Worker

class Sleeper(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def sleep(self, seconds):
        time.sleep(seconds)

backend = RayBackend(address={address!r}, num_cpus=4, log_to_driver=False)
pool = backend.resource_pool([2])
group = backend.worker_group(pool, ClassWithInitArgs(Sleeper), name_prefix="leaving_")
print(*group.pid(), flush=True)
{ending}
"""


def start(address, ending):
    program = textwrap.dedent(PROGRAM).format(address=address, ending=ending)
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def pids_of(program):
    """The line with the workers' process ids; Ray may print lines of its own before."""
    for line in program.stdout:
        words = line.split()
        if len(words) == 2 and all(word.isdigit() for word in words):
            return [int(word) for word in words]
    raise AssertionError(program.communicate()[1])


def runs(pid):
    """Whether the process is there and not merely waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("ending", ["raise RuntimeError('in the controller')", "group.sleep(600)"])
def test_a_controller_that_fails_or_is_interrupted_leaves_nothing(backend, cluster, ending, wait_until):
    free = ray.available_resources()["CPU"]
    program = start(cluster.address, ending)
    pids = pids_of(program)
    if "sleep" in ending:
        time.sleep(0.5)
        program.send_signal(signal.SIGINT)
    program.communicate(timeout=120)
    assert program.returncode != 0
    assert wait_until(lambda: not any(map(runs, pids)))
    # At least: what an earlier test held may have come back only now.
    assert wait_until(lambda: ray.available_resources().get("CPU", 0) >= free)
    assert not [name for name in ray.util.list_named_actors(all_namespaces=True) if "leaving_" in name["name"]]


def test_a_ray_started_by_the_backend_goes_with_it_and_its_shared_memory_too(wait_until):
    before = set(os.listdir("/dev/shm"))
    program = start("local", "backend.close()")
    pids = pids_of(program)
    _, errors = program.communicate(timeout=120)
    assert program.returncode == 0, errors
    assert wait_until(lambda: not any(map(runs, pids)))
    assert wait_until(lambda: not {name for name in set(os.listdir("/dev/shm")) - before if "plasma" in name})
