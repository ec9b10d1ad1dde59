"""Groups of actors: places, calls, data, errors."""

import asyncio
import gc
import os
import signal
import threading
import time
import weakref

import numpy as np
import pytest
import ray

from kapell.decorators import Dispatch, Execute, register
from kapell.ray_backend import (
    InfeasiblePoolError,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    ResourcePoolManager,
    StartTimeoutError,
    calling,
)
from kapell.ray_backend.rendezvous import claim_port
from kapell.workergroup import ClassWithInitArgs, RemoteError, Worker, WorkerFailedError, WorkerLostError


class Unpicklable(Exception):
    def __init__(self, lock):
        super().__init__("holds a lock")
        self.lock = lock


class TwoArguments(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first}-{second}")


class Probe(Worker):
    def __init__(self, offset=0, seconds=0.0):
        super().__init__()
        self.offset = offset
        time.sleep(seconds)

    @register(Dispatch.ONE_TO_ALL)
    def place(self):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RAY_LOCAL_WORLD_SIZE")
        return [os.environ[name] for name in names]

    @register(Dispatch.ONE_TO_ALL)
    def environment(self, name):
        return os.environ.get(name)

    @register(Dispatch.ONE_TO_ALL)
    def loaded_modules(self):
        import sys

        return sorted({"torch", "tensordict", "transformers"} & set(sys.modules))

    @register(Dispatch.DP_COMPUTE_PROTO)
    def shift(self, rows):
        return [row + self.offset + self.rank for row in rows]

    @register(Dispatch.DP_COMPUTE_PROTO)
    async def shift_later(self, rows):
        await asyncio.sleep(0.01 * (self.world_size - self.rank))
        return [row + self.rank for row in rows]

    @register(Dispatch.DP_COMPUTE_PROTO)
    def write(self, array):
        array += 1
        return array

    @register(Dispatch.ONE_TO_ALL)
    def address(self, array):
        return (array.flags.writeable, float(array.sum()))

    @register(Dispatch.ONE_TO_ALL)
    def fail_on(self, rank, kind):
        if self.rank != rank:
            return self.rank
        if kind == "chain":
            try:
                {}["missing"]
            except KeyError as error:
                raise RuntimeError("outer") from error
        raise {
            "plain": ValueError("bad cfg"),
            "unpicklable": Unpicklable(threading.Lock()),
            "two arguments": TwoArguments("a", "b"),
            "exit": SystemExit(3),
            "interrupt": KeyboardInterrupt(),
        }[kind]

    @register(Dispatch.ONE_TO_ALL)
    def stay_on(self, rank):
        if self.rank == rank:
            time.sleep(600)
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def wait_for_file_except(self, rank, path):
        if self.rank == rank:
            raise ValueError("at once")
        while not os.path.exists(path):
            time.sleep(0.01)

    @register(Dispatch.ONE_TO_ALL)
    def task_name(self):
        time.sleep(0.05)
        return ray.get_runtime_context().get_task_name()

    @register(Dispatch.ALL_TO_ALL, Execute.RANK_ZERO)
    def only_first(self, x):
        return x + self.rank


class Sharded(Worker):
    """Two tensor-parallel ranks: both want the one shard, and one of them answers."""

    def __init__(self):
        super().__init__()
        self._register_dispatch_collect_info("train", dp_rank=0, is_collect=self.rank == 0)

    @register(Dispatch.mesh("train"))
    def total(self, rows):
        return [float(rows.sum())]

    @register(Dispatch.mesh("train"))
    def echo(self, rows):
        return rows


class Meeting(Worker):
    """One call waits for another one of the same rank."""

    def __init__(self):
        super().__init__()
        self.came = asyncio.Event()

    @register(Dispatch.ONE_TO_ALL)
    async def wait_for_other(self):
        return await self.came.wait()

    @register(Dispatch.ONE_TO_ALL)
    async def come(self):
        self.came.set()
        return True


class Summing(Worker):
    """Built from numbers: as they are, or what a reference to them refers to."""

    def __init__(self, given):
        super().__init__()
        self.numbers = ray.get(given["numbers"]) if isinstance(given, dict) else given

    @register(Dispatch.ONE_TO_ALL)
    def total(self):
        return int(self.numbers.sum())


class Leader(Worker):
    """Has a group of its own."""

    def __init__(self):
        super().__init__()
        pool = RayResourcePool([2], use_gpu=False, cpus_per_process=0.5)
        self.helpers = RayWorkerGroup(pool, ClassWithInitArgs(Probe, offset=10 * self.rank), start_timeout=240)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def shift(self, rows):
        return self.helpers.shift(rows)

    @register(Dispatch.ONE_TO_ALL)
    def places(self):
        return os.environ["RANK"], [place[0] for place in self.helpers.place()]


class Broken(Worker):
    def __init__(self):
        super().__init__()
        if self.rank == 1:
            raise ValueError("bad cfg")


@pytest.fixture(scope="module")
def group(pool):
    with RayWorkerGroup(pool, ClassWithInitArgs(Probe, offset=10), role="probe") as group:
        yield group


def test_each_worker_knows_its_place(group):
    assert group.place() == [["0", "2", "0", "2", "2"], ["1", "2", "1", "2", "2"]]


def test_workers_load_nothing_heavy(group):
    assert group.loaded_modules() == [[], []]


def test_rows_are_split_and_joined_in_order(group):
    assert group.shift([1, 2, 3]) == [11, 12, 14]


def test_async_methods_are_awaited_and_joined_in_input_order(group):
    assert group.shift_later([1, 2, 3, 4]) == [1, 2, 4, 5]


def test_a_call_on_rank_zero_runs_there_only(group):
    assert group.only_first(5) == 5


@pytest.mark.parametrize("threads", [1, 2])
def test_a_task_is_named_by_its_method_and_every_call_is_timed(pool, threads):
    with RayWorkerGroup(pool, ClassWithInitArgs(Probe), options={"max_concurrency": threads}) as group:
        assert group.task_name() == ["task_name"] * 2
        assert group.task_name.options(blocking=False)().get(timeout=240) == ["task_name"] * 2
        assert group.place()[1][0] == "1"
        times = group.stats()["task_name"].ranks
        assert [(time.rank, time.run >= 0.1) for time in times] == [(0, True), (1, True)]  # two calls of 0.05 s


def test_any_method_can_be_run_on_all(group):
    assert group.execute_all_sync("get_master_addr_port")[0] == group.execute_all_sync("get_master_addr_port")[1]
    assert group.execute_all_sync("get_master_addr_port")[0] == (group.master_address, group.master_port)


@pytest.mark.parametrize("rows", [4, 100_000])
def test_arrays_arrive_private_and_writable(group, rows):
    array = np.arange(rows, dtype=np.float64)
    result = group.write(array)
    np.testing.assert_array_equal(result, np.arange(rows) + 1)
    np.testing.assert_array_equal(array, np.arange(rows))
    result += 1  # what comes back is writable too


@pytest.mark.parametrize("rows", [4, 100_000])
def test_a_replicated_array_is_private_on_each_rank(group, rows):
    assert group.address(np.ones(rows)) == [(True, rows)] * 2


@pytest.fixture
def puts(monkeypatch):
    """Whatever goes into the store from here."""
    made = []
    put = calling.put_value

    def counted(value, what):
        made.append(value.nbytes)
        return put(value, what)

    monkeypatch.setattr(calling, "put_value", counted)
    return made


def test_an_argument_for_all_is_put_once_and_each_shard_once(group, puts):
    array = np.ones(100_000)
    group.address(array)
    assert len(puts) == 1
    assert puts.pop() > array.nbytes
    group.write(array)
    assert len(puts) == 2
    assert sum(puts) < 1.1 * array.nbytes


def test_a_shard_that_two_ranks_share_is_put_once(pool, puts):
    with RayWorkerGroup(pool, ClassWithInitArgs(Sharded)) as group:
        assert group.total(np.ones(100_000)) == [100_000]
    assert len(puts) == 1


def test_the_result_of_a_rank_that_is_not_collected_is_never_fetched(pool):
    with RayWorkerGroup(pool, ClassWithInitArgs(Sharded)) as group:
        sent = np.ones(100_000)
        np.testing.assert_array_equal(group.echo(sent), sent)
        assert group.stats()["echo"].fetched == sent.nbytes


def test_a_reference_is_read_where_it_is_used(group):
    assert group.address(ray.put(np.ones(5)))[0][1] == 5


@pytest.mark.parametrize(
    ("given", "total"),
    [
        (lambda: np.ones(5), 5),
        (lambda: np.ones(100_000), 100_000),
        (lambda: {"numbers": ray.put(np.ones(7))}, 7),
    ],
    ids=["small", "large", "a reference"],
)
def test_constructors_take_what_methods_take(pool, given, total):
    with RayWorkerGroup(pool, ClassWithInitArgs(Summing, given())) as group:
        assert group.total() == [total, total]


def test_a_non_blocking_call_is_a_future_and_a_list_of_references(group):
    pending = group.place.options(blocking=False)()
    assert ray.get(pending) == pending.get(timeout=240) == group.place()


def test_an_error_names_role_rank_and_method_and_is_the_workers_own(group):
    with pytest.raises(WorkerFailedError, match=r"probe.*fail_on") as caught:
        group.fail_on(1, "plain")
    error = caught.value.failures[1]
    assert type(error) is ValueError
    assert str(error) == "bad cfg"
    assert "in fail_on" in "".join(error.__notes__)
    assert caught.value.results == {0: 0}


def test_the_cause_of_an_error_is_shown(group):
    with pytest.raises(WorkerFailedError) as caught:
        group.fail_on(0, "chain")
    error = caught.value.failures[0]
    assert type(error) is RuntimeError
    assert "KeyError: 'missing'" in "".join(error.__notes__)


def test_an_exception_whose_constructor_wants_other_arguments_arrives_as_itself(group):
    with pytest.raises(WorkerFailedError) as caught:
        group.fail_on(1, "two arguments")
    assert type(caught.value.failures[1]) is TwoArguments
    assert str(caught.value.failures[1]) == "a-b"


@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [
        ("unpicklable", "Unpicklable", "holds a lock"),
        ("exit", "SystemExit", "3"),
        ("interrupt", "KeyboardInterrupt", ""),
    ],
)
def test_an_error_that_cannot_travel_comes_as_its_text(group, kind, name, text):
    with pytest.raises(WorkerFailedError) as caught:
        group.fail_on(1, kind)
    error = caught.value.failures[1]
    assert type(error) is RemoteError
    assert error.type_name == name
    assert text in error.message
    assert "in fail_on" in error.traceback_text


def test_a_failing_rank_is_reported_while_another_is_busy(group, tmp_path):
    release = tmp_path / "release"
    with pytest.raises(WorkerFailedError) as caught:
        group.wait_for_file_except(1, str(release))
    release.touch()
    assert caught.value.unfinished == (0,)


def test_a_constructor_that_raises_is_reported_at_creation_and_leaves_nothing(backend, wait_until):
    free = ray.available_resources()["CPU"]
    pool = backend.resource_pool([2])
    with pytest.raises(WorkerFailedError, match=r"Broken.*__init__.*rank 1") as caught:
        RayWorkerGroup(pool, ClassWithInitArgs(Broken))
    assert str(caught.value.failures[1]) == "bad cfg"
    # At least: what an earlier test held may have come back only now.
    assert wait_until(lambda: ray.available_resources().get("CPU", 0) >= free)
    # The same pool serves a second try.
    with RayWorkerGroup(pool, ClassWithInitArgs(Probe)) as group:
        assert group.world_size == 2
    pool.close()


def test_a_worker_killed_in_a_call_is_a_lost_worker_and_can_be_restarted(pool):
    with RayWorkerGroup(pool, ClassWithInitArgs(Probe), role="mortal") as group:
        pending = group.stay_on.options(blocking=False)(1)
        ray.wait([pending[0]])  # a lost rank is reported a second later, whatever the others do
        os.kill(group.processes[1].pid, signal.SIGKILL)
        with pytest.raises(WorkerLostError, match=r"mortal.* lost rank 1 of 2") as caught:
            pending.get(timeout=240)
        assert caught.value.results == {0: 0}
        assert "pid" in caught.value.failures[1].node
        assert "exit" in caught.value.failures[1].reason
        assert group.is_alive() == [True, False]
        group.restart(1)
        assert group.is_alive() == [True, True]
        assert group.place() == [["0", "2", "0", "2", "2"], ["1", "2", "1", "2", "2"]]


def test_worker_env_reaches_its_group_only(pool):
    with (
        RayWorkerGroup(pool, ClassWithInitArgs(Probe), worker_env={"KAPELL_PROBE": "1"}) as one,
        RayWorkerGroup(pool, ClassWithInitArgs(Probe), worker_env={"KAPELL_PROBE": "2"}) as other,
    ):
        assert one.environment("KAPELL_PROBE") == ["1", "1"]
        assert other.environment("KAPELL_PROBE") == ["2", "2"]


def test_protected_variables_are_refused_before_anything_starts(pool):
    with pytest.raises(ValueError, match="MASTER_PORT, RANK"):
        RayWorkerGroup(pool, ClassWithInitArgs(Probe), worker_env={"RANK": "7", "MASTER_PORT": "1"})


@pytest.mark.parametrize("way", ["options", "class", "remote"])
def test_protected_variables_are_refused_in_a_runtime_env_too(pool, way):
    options = {"runtime_env": {"env_vars": {"RANK": "7", "CUDA_VISIBLE_DEVICES": "1"}}}
    probe = RayClassWithInitArgs(ray.remote(**options)(Probe) if way == "remote" else Probe)
    if way == "class":
        probe.update_options(options)
    with pytest.raises(ValueError, match=r'runtime_env\["env_vars"\] sets CUDA_VISIBLE_DEVICES, RANK'):
        RayWorkerGroup(pool, probe, options=options if way == "options" else None)


def test_verls_timeout_bounds_the_start(pool):
    arguments = pool, ClassWithInitArgs(Probe, seconds=600.0), True, None, False, None, None, 3
    with pytest.raises(StartTimeoutError, match=r"__init__ of rank 0, 1 is not done|start of the process"):
        RayWorkerGroup(*arguments)
    with RayWorkerGroup(pool, ClassWithInitArgs(Probe), ray_wait_register_center_timeout=300) as group:
        assert group.world_size == 2


def test_options_of_a_group_do_not_stick_to_the_class(pool):
    probe = RayClassWithInitArgs(Probe)
    with RayWorkerGroup(pool, probe, worker_env={"KAPELL_PROBE": "1"}, options={"max_concurrency": 2}):
        pass
    assert probe.options == {}
    with RayWorkerGroup(pool, probe) as group:
        assert group.environment("KAPELL_PROBE") == [None, None]


def test_a_group_is_found_by_its_workers_names(group):
    attached = RayWorkerGroup.from_detached(worker_names=group.worker_names)
    assert attached.shift([1, 2]) == [11, 13]
    attached.close()
    assert group.shift([1, 2]) == [11, 13]


def test_workers_of_two_groups_with_one_prefix_have_names_of_their_own(pool):
    probe = ClassWithInitArgs(Probe)
    with (
        RayWorkerGroup(pool, probe, name_prefix="twin_") as one,
        RayWorkerGroup(pool, probe, name_prefix="twin_") as two,
    ):
        names = [*one.worker_names, *two.worker_names]
        assert len(set(names)) == 4
        assert all(name.startswith("twin_") for name in names)


def test_variables_of_a_runtime_env_reach_the_workers_beside_those_of_worker_env(pool):
    options = {"runtime_env": {"env_vars": {"KAPELL_PROBE": "1"}}}
    with RayWorkerGroup(pool, ClassWithInitArgs(Probe), options=options, worker_env={"KAPELL_OTHER": "2"}) as group:
        assert group.environment("KAPELL_PROBE") == ["1", "1"]
        assert group.environment("KAPELL_OTHER") == ["2", "2"]


def test_async_methods_overlap_where_the_options_of_the_class_ask_for_it(pool):
    meeting = RayClassWithInitArgs(Meeting)
    meeting.update_options({"max_concurrency": 4})
    with RayWorkerGroup(pool, meeting, timeout=240) as group:
        waiting = group.wait_for_other.options(blocking=False)()
        assert group.come() == [True, True]
        assert waiting.get() == [True, True]


def test_workers_have_groups_of_their_own_which_end_with_them(pool, wait_until):
    free = ray.available_resources()["CPU"]
    with RayWorkerGroup(pool, ClassWithInitArgs(Leader), timeout=240) as group:
        assert group.shift([1, 2, 3, 4]) == [1, 3, 13, 15]
        assert group.places() == [("0", ["0", "1"]), ("1", ["0", "1"])]
        before = ray.available_resources().get("CPU", 0)
        group.restart(1)
        assert group.shift([1, 2, 3, 4]) == [1, 3, 13, 15]
        assert wait_until(lambda: ray.available_resources().get("CPU", 0) >= before)
    # At least: what an earlier test held may have come back only now.
    assert wait_until(lambda: ray.available_resources().get("CPU", 0) >= free)


def test_pools_are_found_by_role_and_checked_together(backend):
    spec, roles = {"train": [2], "serve": [1]}, {"actor": "train", "critic": "train", "rollout": "serve"}
    manager = ResourcePoolManager(spec, roles, use_gpu=False)
    with pytest.raises(KeyError, match=r"call create_resource_pool\(\)"):
        manager.get_resource_pool("actor")
    manager.create_resource_pool()
    assert manager.get_resource_pool("actor") is manager.get_resource_pool("critic")
    assert manager.get_resource_pool("rollout").store == [1]
    assert manager.get_n_gpus() == 3
    with pytest.raises(KeyError, match="no pool is named for role 'judge'; roles: actor, critic, rollout"):
        manager.get_resource_pool("judge")
    with pytest.raises(InfeasiblePoolError, match="need 1200 CPU"):  # each alone would be refused only when it is used
        ResourcePoolManager({"a": [600], "b": [600]}, {}, use_gpu=False).create_resource_pool()


def test_given_rendezvous_is_honoured_and_half_of_one_refused(pool):
    with RayWorkerGroup(pool, ClassWithInitArgs(Probe), master_addr="10.1.2.3", master_port=29500) as group:
        assert group.execute_all_sync("get_master_addr_port") == [("10.1.2.3", "29500")] * 2
    with pytest.raises(ValueError, match="give both"):
        RayWorkerGroup(pool, ClassWithInitArgs(Probe), master_addr="10.1.2.3")


def test_groups_take_different_ports_from_one_range(pool):
    with claim_port() as free:
        ports = range(free.port, free.port + 20)
    with (
        RayWorkerGroup(pool, ClassWithInitArgs(Probe), master_port_range=[ports.start, ports.stop]) as one,
        RayWorkerGroup(pool, ClassWithInitArgs(Probe), master_port_range=[ports.start, ports.stop]) as other,
    ):
        assert one.master_port != other.master_port
        assert {int(one.master_port), int(other.master_port)} <= set(ports)


def test_a_pool_too_big_for_the_cluster_fails_at_once(backend):
    with pytest.raises(ValueError, match="need 1000 CPU but the cluster has"):
        RayWorkerGroup(RayResourcePool([1000], use_gpu=False), ClassWithInitArgs(Probe))
    with pytest.raises(ValueError, match="use_gpu=False"):
        RayWorkerGroup(RayResourcePool([1]), ClassWithInitArgs(Probe))


def test_a_group_on_handles_comes_in_the_order_of_ranks(group):
    attached = RayWorkerGroup.from_detached(worker_handles=group.workers[::-1])
    assert attached.execute_all_sync("get_master_addr_port")[0][1] == group.master_port
    assert attached.shift([1, 2]) == [11, 13]
    with pytest.raises(RuntimeError, match="another program"):
        attached.restart(0)


def test_a_detached_group_is_found_by_its_prefix(backend):
    with backend.resource_pool([2], detached=True) as pool:
        group = RayWorkerGroup(pool, ClassWithInitArgs(Probe, offset=1), name_prefix="kept_", detached=True)
        attached = RayWorkerGroup.from_detached(name_prefix="kept_")
        assert attached.shift([1, 2]) == [2, 4]
        group.close()
        with pytest.raises(ValueError, match="begin with 'nobody_'"):
            RayWorkerGroup.from_detached(name_prefix="nobody_")


def test_a_group_beside_another_needs_no_resources_of_its_own(backend):
    with (
        backend.resource_pool([2], max_colocate_count=1) as pool,
        RayWorkerGroup(pool, ClassWithInitArgs(Probe, offset=1)) as main,
        RayWorkerGroup(sharing_with=main, ray_cls_with_init=ClassWithInitArgs(Probe, offset=2)) as beside,
    ):
        assert beside.shift([1, 2]) == [3, 5]
        assert beside.place() == main.place()


def test_one_group_too_many_on_a_pool_is_refused_at_once(backend):
    probe = ClassWithInitArgs(Probe)
    with backend.resource_pool([1], max_colocate_count=1) as pool:
        with RayWorkerGroup(pool, probe), pytest.raises(ValueError, match="1 groups already share this pool"):
            RayWorkerGroup(pool, probe)
        with RayWorkerGroup(pool, probe) as group:
            assert group.world_size == 1


def test_results_of_calls_that_nobody_holds_are_released(group):
    pending = [group.write.options(blocking=False)(np.ones(100_000)) for _ in range(20)]
    kept = [weakref.ref(call) for call in pending]
    assert pending[3].get(timeout=240) is pending[3].get()
    del pending
    gc.collect()
    assert not [call for call in kept if call() is not None]
