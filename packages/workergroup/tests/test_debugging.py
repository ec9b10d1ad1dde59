import inspect
import threading
import traceback

import pytest

from kapell.decorators import Dispatch, register
from kapell.workergroup import ClassWithInitArgs, LocalWorkerGroup, ResourcePool, Worker, WorkerFailedError


class Stepper(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def callers(self):
        return threading.current_thread().name, [frame.function for frame in inspect.stack()]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def fail(self, rows):
        """Fails."""
        seen_here = rows
        return deeper(seen_here)

    @register(Dispatch.ONE_TO_ALL)
    async def fail_later(self):
        raise ValueError("later")


def deeper(rows):
    raise ValueError(f"cannot use {rows}")


@pytest.fixture
def group():
    with LocalWorkerGroup(ResourcePool([2]), ClassWithInitArgs(Stepper), role="stepper") as group:
        yield group


def test_serial_workers_run_in_the_callers_stack_so_that_breakpoints_work(group):
    for thread, functions in group.callers():
        assert thread == threading.current_thread().name
        assert "test_serial_workers_run_in_the_callers_stack_so_that_breakpoints_work" in functions


def test_traceback_shows_the_users_frames_and_not_kapells(group):
    with pytest.raises(WorkerFailedError) as caught:
        group.fail([1, 2])
    for error in caught.value.exceptions:
        frames = traceback.extract_tb(error.__traceback__)
        assert [frame.name for frame in frames] == ["fail", "deeper"]
        assert {frame.filename for frame in frames} == {__file__}


def test_async_methods_show_the_users_frames_too(group):
    with pytest.raises(WorkerFailedError) as caught:
        group.fail_later()
    assert [frame.name for frame in traceback.extract_tb(caught.value.exceptions[0].__traceback__)] == ["fail_later"]


def test_caller_sees_one_frame_of_kapell_at_most():
    with (
        LocalWorkerGroup(ResourcePool([1]), ClassWithInitArgs(Stepper)) as group,
        pytest.raises(ExceptionGroup) as caught,
    ):
        group.fail([1])
    names = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert sum("kapell/workergroup" in name for name in names) <= 1


def test_local_variables_are_there_for_post_mortem(group):
    with pytest.raises(WorkerFailedError) as caught:
        group.fail([1, 2])
    assert caught.value.failures[1].__traceback__.tb_frame.f_locals["seen_here"] == [2]


def test_labelled_methods_keep_their_source_and_doc(group):
    assert inspect.getsourcefile(Stepper.fail) == __file__
    assert group.fail.__doc__ == "Fails."
    assert inspect.unwrap(group.fail) is Stepper.fail
