"""What a worker sees of its node's devices, and the profiler that may start it: on a node that only declares them."""

import os
import sys

import pytest
import ray

from kapell.decorators import Dispatch, register
from kapell.ray_backend import RayResourcePool, RayWorkerGroup
from kapell.ray_backend.profiling import profiled
from kapell.workergroup import ClassWithInitArgs, Worker

# Stands for Nvidia's profiler: notes how it was called, and runs the program behind its options.
NSYS = """#!/bin/sh
echo "$@" >> {log}
shift
while [ $# -gt 0 ]; do
    case "$1" in --*=*) shift ;; -*) shift 2 ;; *) break ;; esac
done
exec "$@"
"""


# Stands for the library through which Ray asks AMD's driver; Python runs a module of this name when it starts.
AMD_LIBRARY = """
import sys, types
library = types.ModuleType("ray._private.thirdparty.pyamdsmi")
library.smi_initialize = library.smi_shutdown = lambda: None
library.smi_get_device_count = lambda: 2
sys.modules[library.__name__] = library
"""


class Looker(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def see(self, *names):
        return [os.environ.get(name) for name in names]


@pytest.fixture(scope="module")
def nsys_log(tmp_path_factory):
    return tmp_path_factory.mktemp("nsys") / "log"


@pytest.fixture
def alive(wait_until):
    """Waits until so many nodes are; a program that joins takes any node of this host that it believes alive."""
    return lambda count: wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == count)


@pytest.fixture
def amd_node(backend, cluster, alive, tmp_path):
    """A node that says it has two GPUs of AMD's make, which pools ask for by type."""
    (tmp_path / "sitecustomize.py").write_text(AMD_LIBRARY)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    before = sum(node["Alive"] for node in ray.nodes())
    mark = {"accelerator_type:AMD": 1}
    node = cluster.add_node(num_cpus=4, num_gpus=2, resources=mark, env_vars={"PYTHONPATH": path})
    cluster.wait_for_nodes(timeout=240)
    yield node
    cluster.remove_node(node)
    assert alive(before)


@pytest.fixture(scope="module")
def device_node(backend, cluster, wait_until, nsys_log):
    """A node that says it has two GPUs and two NPUs, and has the profiler on its path."""
    script = nsys_log.parent / "nsys"
    script.write_text(NSYS.format(log=nsys_log))
    script.chmod(0o755)
    # The profiler starts the "python" that it finds.
    path = os.pathsep.join([str(nsys_log.parent), os.path.dirname(sys.executable), os.environ["PATH"]])
    node = cluster.add_node(num_cpus=4, num_gpus=2, resources={"NPU": 2}, env_vars={"PATH": path})
    cluster.wait_for_nodes(timeout=240)
    yield node
    cluster.remove_node(node)
    # A program that joins the cluster takes any node of this host that it believes alive.
    assert wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == 1)


def test_each_worker_sees_its_own_gpu_and_groups_on_a_pool_see_the_same(device_node):
    looker = ClassWithInitArgs(Looker)
    with (
        RayResourcePool([2], max_colocate_count=2, timeout=240) as pool,
        RayWorkerGroup(pool, looker) as one,
        RayWorkerGroup(pool, looker) as other,
    ):
        assert one.see("CUDA_VISIBLE_DEVICES", "LOCAL_RANK") == [["0", "0"], ["1", "1"]]
        assert other.see("CUDA_VISIBLE_DEVICES", "LOCAL_RANK") == [["0", "0"], ["1", "1"]]
        with RayWorkerGroup(sharing_with=one, ray_cls_with_init=looker) as beside:
            assert beside.see("CUDA_VISIBLE_DEVICES") == [["0"], ["1"]]


def test_where_ray_leaves_visible_devices_alone_the_local_rank_is_the_device(device_node):
    noset = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    with (
        RayResourcePool([1], max_colocate_count=1, timeout=240) as first,
        RayResourcePool([1], max_colocate_count=1, timeout=240) as second,
        RayWorkerGroup(first, ClassWithInitArgs(Looker)) as holder,
        RayWorkerGroup(second, ClassWithInitArgs(Looker), worker_env=noset) as group,
    ):
        ((taken,),) = holder.see("CUDA_VISIBLE_DEVICES")
        ((local_rank, world_size),) = group.see("LOCAL_RANK", "LOCAL_WORLD_SIZE")
        assert {taken, local_rank} == {"0", "1"}
        assert world_size == "1"


def test_a_group_beside_one_that_sees_all_devices_has_its_device_too(device_node):
    noset = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    looker = ClassWithInitArgs(Looker)
    with (
        RayResourcePool([1], max_colocate_count=1, timeout=240) as first,
        RayResourcePool([1], max_colocate_count=1, timeout=240) as second,
        RayWorkerGroup(first, looker, worker_env=noset) as one,
        RayWorkerGroup(second, looker, worker_env=noset) as other,
        RayWorkerGroup(sharing_with=one, ray_cls_with_init=looker) as beside_one,
        RayWorkerGroup(sharing_with=other, ray_cls_with_init=looker) as beside_other,
    ):
        ranks = [group.see("LOCAL_RANK") for group in (one, other, beside_one, beside_other)]
        assert ranks[:2] in ([[["0"]], [["1"]]], [[["1"]], [["0"]]])
        assert ranks[2:] == ranks[:2]


def test_each_worker_sees_its_own_npu_whatever_ray_is_told_about_gpus(device_node):
    noset = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    with (
        RayResourcePool([2], timeout=240) as pool,
        RayWorkerGroup(pool, ClassWithInitArgs(Looker), device_name="npu", worker_env=noset) as group,
    ):
        assert group.see("ASCEND_RT_VISIBLE_DEVICES", "LOCAL_RANK") == [["0", "0"], ["1", "1"]]


def test_each_worker_on_an_amd_node_sees_its_own_gpu_and_a_group_beside_it_the_same(amd_node):
    looker = ClassWithInitArgs(Looker)
    with (
        RayResourcePool([2], accelerator_type="AMD", timeout=240) as pool,
        RayWorkerGroup(pool, looker) as group,
        RayWorkerGroup(sharing_with=group, ray_cls_with_init=looker) as beside,
    ):
        names = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "LOCAL_RANK")
        seen = group.see(*names)
        # Ray's newer versions set the first variable, its older ones the second.
        assert [[value for value in values if value is not None] for values in seen] == [["0", "0"], ["1", "1"]]
        assert beside.see(*names) == seen


@pytest.mark.parametrize(
    "name",
    ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "LOCAL_RANK"],
)
def test_variables_that_place_workers_on_devices_are_refused(backend, name):
    with backend.resource_pool([1]) as pool, pytest.raises(ValueError, match=name):
        RayWorkerGroup(pool, ClassWithInitArgs(Looker), worker_env={name: "1"})


def test_workers_start_under_the_profiler_when_steps_are_to_be_profiled_or_ray_is_asked_to(device_node, nsys_log):
    looker, options = ClassWithInitArgs(Looker), {"t": "cuda,nvtx", "o": "'profiled_%p'"}
    rays_own = {"runtime_env": {"nsight": {"t": "osrt", "o": "'asked_%p'"}, "env_vars": {"KAPELL_PROBE": "1"}}}
    with RayResourcePool([1], timeout=240) as pool:
        with RayWorkerGroup(pool, looker, worker_nsight_options=options) as group:
            assert group.see("RANK") == [["0"]]
        assert not nsys_log.exists()
        with (
            RayWorkerGroup(pool, looker, profile_steps=[1], worker_nsight_options=options) as one,
            RayWorkerGroup(pool, looker, options=rays_own) as other,
        ):
            assert one.see("RANK", "KAPELL_PROBE") == [["0", None]]
            assert other.see("RANK", "KAPELL_PROBE") == [["0", "1"]]
    calls = nsys_log.read_text().splitlines()
    assert any("-t cuda,nvtx" in call and "profiled_" in call for call in calls), calls
    assert any("-t osrt" in call and "asked_" in call for call in calls), calls


def test_the_profiler_is_told_how_many_ranges_it_may_meet():
    null = {"capture-range-end": None}
    assert profiled(null, [1, 2], "cuda") == {"runtime_env": {"nsight": {"capture-range-end": "repeat-shutdown:12"}}}
    assert null == {"capture-range-end": None}
    given = {"capture-range-end": "repeat-shutdown:2"}
    assert profiled(given, [1, 2], "cuda") == {"runtime_env": {"nsight": given}}
    assert profiled(given, [], "cuda") == profiled(given, [1], "npu") == profiled(None, [1], "cuda") == {}
