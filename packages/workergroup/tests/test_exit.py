"""A program that fails ends: nothing that a group started keeps it alive."""

import gc
import subprocess
import sys
import threading

import pytest

from kapell.workergroup import ClassWithInitArgs, LocalBackend, LocalWorkerGroup, ResourcePool, Worker

PROGRAM = """
import time
from kapell.decorators import Dispatch, register
from kapell.workergroup import ClassWithInitArgs, LocalWorkerGroup, ResourcePool, Worker

class Sleeper(Worker):
    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def sleep(self):
        time.sleep(600)

group = LocalWorkerGroup(ResourcePool([2]), ClassWithInitArgs(Sleeper), mode="threads")
watch = group.watch(print, interval=0.1)
group.sleep()
raise RuntimeError("the controller fails")
"""


def test_program_with_busy_workers_ends_with_its_error():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "the controller fails" in done.stderr


def test_program_that_ends_lets_a_short_call_finish():
    # Cut off in C++ code, such as torch's, a thread would take the whole process down with SIGABRT.
    program = PROGRAM.replace("time.sleep(600)", "print('begun'); time.sleep(0.5); print('finished')")
    program = program.replace("raise", "time.sleep(0.2)\nraise")
    done = subprocess.run([sys.executable, "-u", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout.count("begun") == done.stdout.count("finished") == 2


@pytest.mark.parametrize("mode", ["serial", "threads"])
def test_closing_leaves_no_thread(mode):
    before = set(threading.enumerate())
    with LocalWorkerGroup(ResourcePool([3]), ClassWithInitArgs(Worker), mode=mode) as group:
        group.execute_all_sync("get_master_addr_port")
    for thread in set(threading.enumerate()) - before:
        thread.join(10.0)
    assert set(threading.enumerate()) <= before


def test_group_that_nobody_holds_ends_its_threads():
    before = set(threading.enumerate())
    with LocalBackend("threads") as backend:
        group = backend.worker_group(backend.resource_pool([2]), ClassWithInitArgs(Worker))
        view = group[0]
        del group
        gc.collect()
        assert len(view.execute_all_sync("get_master_addr_port")) == 1
        started = set(threading.enumerate()) - before
        assert len(started) == 2
        del view
        gc.collect()
        for thread in started:
            thread.join(10.0)
        assert not any(thread.is_alive() for thread in started)
