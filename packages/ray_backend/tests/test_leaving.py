"""A program that ends, in whatever way, leaves no actor, no reservation, no process and no shared memory."""

import ipaddress
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from contextlib import suppress
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

    @register(Dispatch.DP_COMPUTE_PROTO)
    def same(self, rows):
        return rows

backend = RayBackend(address={address!r}, num_cpus=4, log_to_driver=False)
pool = backend.resource_pool([2])
group = backend.worker_group(pool, ClassWithInitArgs(Sleeper), name_prefix="leaving_")
print(*group.pid(), flush=True)
{ending}
"""


def start(address, ending, **environment):
    program = textwrap.dedent(PROGRAM).format(address=address, ending=ending)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", program], env={**os.environ, **environment}, text=True, **pipes)


def pids_of(program):
    """The line with the workers' process ids; Ray may print lines of its own before."""
    for line in program.stdout:
        words = line.split()
        if len(words) == 2 and all(word.isdigit() for word in words):
            return [int(word) for word in words]
    raise AssertionError(program.communicate()[1])


def family_of(pid):
    """The process and all that descend from it."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return family


def listening_addresses(pids):
    """Where the processes listen for TCP connections."""
    sockets = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):
                sockets.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            local, state, inode = (line.split()[column] for column in (1, 3, 9))
            if state == "0A" and inode in sockets:
                words = [bytes.fromhex(local[at : at + 8])[::-1] for at in range(0, len(local) - 5, 8)]
                address = ipaddress.ip_address(b"".join(words))
                addresses.add(getattr(address, "ipv4_mapped", None) or address)
    return addresses


def runs(pid):
    """Whether the process is there and not merely waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("ending", ["raise RuntimeError('in the controller')", "group.sleep(600)"])
def test_a_controller_that_fails_or_is_interrupted_leaves_nothing(backend, cluster, ending, wait_until):
    free = ray.available_resources()["CPU"]
    program = start("auto", ending, RAY_ADDRESS=cluster.address)  # joined, as one's own cluster is
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


NEXT_SESSION = """
import kapell.protocol, numpy, ray
from kapell.ray_backend import RayWorkerGroup
part = pool.split(1)[1]
pending = group.pid.options(blocking=False)()
batch = group.same.options(blocking=False)(numpy.arange(4))
half = batch.chunk(2)[0]
sent = [ray.cloudpickle.dumps(future) for future in (pending, batch, half)]
ray.shutdown()

def refused(*asks):
    for number, ask in enumerate(asks):
        try:
            ask()
            print("no refusal of", number)
        except RuntimeError as error:
            print(type(error).__name__, error)

questions = (
    group.pid,
    lambda: group.same(numpy.zeros(100_000)),
    pending.done,
    pending.get,
    batch.get,
    half.get,
    lambda: batch.chunk(2)[0].get(),
    lambda: group.restart(0),
    lambda: ray.cloudpickle.dumps(group),
    lambda: ray.cloudpickle.dumps([pending]),
    lambda: ray.cloudpickle.dumps([batch]),
    lambda: ray.cloudpickle.dumps([half]),
    lambda: RayWorkerGroup(ray_cls_with_init=ClassWithInitArgs(Sleeper), sharing_with=group),
    lambda: RayWorkerGroup.from_detached(worker_handles=group.workers),
)
refused(*questions)
print("started by asking:", ray.is_initialized())
with RayBackend(address="local", num_cpus=4, log_to_driver=False) as later:
    remaining = later.worker_group(later.resource_pool([1]), ClassWithInitArgs(Sleeper))
    refused(*questions, lambda: later.worker_group(part, ClassWithInitArgs(Sleeper)))
    refused(*(ray.cloudpickle.loads(future).get for future in sent))
    again = later.worker_group(pool, ClassWithInitArgs(Sleeper))
    print("placed anew:", len(again.pid()))
    group.close()
    part.close()
    backend.close()
    print("closed;", len(remaining.pid()), "remains")
"""


def test_what_an_ended_session_held_is_refused_without_ray_and_in_the_next_one_and_closes_without_taking_of_that():
    output, errors = start("local", NEXT_SESSION).communicate(timeout=300)
    refusals = [line for line in output.splitlines() if line.startswith("EndedSessionError")]
    assert "no refusal" not in output, output + errors
    assert len(refusals) == 14 + 15 + 3, output + errors
    assert "started by asking: False" in output
    assert all("ray.shutdown" in line and "anew" in line for line in refusals)
    assert "placed anew: 2" in output, errors
    assert "closed; 1 remains" in output, errors


@pytest.fixture
def killed_ray(deaf_address):
    """A folder in which a Ray that was killed has left its address; short, for the sake of its sockets' names."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        left = Path(folder, "ray", "ray_current_cluster")
        left.parent.mkdir()
        left.write_text(deaf_address)
        yield folder


def test_a_ray_started_here_although_a_killed_one_left_its_address_stays_on_loopback_and_goes_with_its_shared_memory(
    killed_ray, deaf_address, monkeypatch, wait_until
):
    for name in ("RAY_ADDRESS", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    before = set(os.listdir("/dev/shm"))
    program = start("auto", "input()\nbackend.close()", RAY_TMPDIR=killed_ray)
    pids = pids_of(program)
    addresses = listening_addresses(family_of(program.pid))
    assert addresses
    assert all(address.is_loopback for address in addresses), addresses
    _, errors = program.communicate("\n", timeout=120)
    assert program.returncode == 0, errors
    assert f"nothing answers at {deaf_address}" in errors
    assert wait_until(lambda: not any(map(runs, pids)))
    assert wait_until(lambda: not {name for name in set(os.listdir("/dev/shm")) - before if "plasma" in name})
