import asyncio
import os
import subprocess
import sys
import threading

import pytest

from kapell.decorators import Dispatch, register
from kapell.workergroup import ClassWithInitArgs, LocalWorkerGroup, ResourcePool, Worker

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Look(Worker):
    def __init__(self):
        super().__init__()
        self.at_start = {name: os.environ[name] for name in PLACE}

    @register(Dispatch.ONE_TO_ALL)
    def at_start_and_now(self):
        return self.at_start == {name: os.environ.get(name) for name in PLACE}, self.at_start

    @register(Dispatch.ONE_TO_ALL)
    async def rank_after_awaiting(self):
        await asyncio.sleep(0)
        return os.environ["RANK"]

    @register(Dispatch.ONE_TO_ALL)
    def change(self):
        os.environ["KAPELL_TEST_NEW"] = str(self.rank)
        del os.environ["KAPELL_TEST_OLD"]
        return "KAPELL_TEST_OLD" in os.environ, "KAPELL_TEST_NEW" in list(os.environ), os.environ.copy()["RANK"]

    @register(Dispatch.ONE_TO_ALL)
    def wrong(self):
        os.environ["KAPELL_TEST_NEW"] = 1


@pytest.fixture(params=["serial", "threads"])
def group(request):
    with LocalWorkerGroup(ResourcePool([2, 1]), ClassWithInitArgs(Look), mode=request.param) as group:
        yield group


def test_place_is_seen_in_the_constructor_and_in_calls(group):
    found = group.at_start_and_now()
    assert all(same for same, _ in found)
    assert [env["RANK"] for _, env in found] == ["0", "1", "2"]
    assert [env["LOCAL_RANK"] for _, env in found] == ["0", "1", "0"]
    assert [env["LOCAL_WORLD_SIZE"] for _, env in found] == ["2", "2", "1"]
    assert len({env["MASTER_PORT"] for _, env in found}) == 1


def test_async_methods_see_their_own_place(group):
    assert group.rank_after_awaiting() == ["0", "1", "2"]


def test_workers_variables_never_reach_the_process_or_each_other(group, monkeypatch):
    monkeypatch.setenv("KAPELL_TEST_OLD", "kept")
    before = dict(os.environ)
    assert group.change() == [(False, True, "0"), (False, True, "1"), (False, True, "2")]
    assert dict(os.environ) == before
    assert "RANK" not in before
    code = "import os; print(os.environ.get('KAPELL_TEST_OLD'), os.environ.get('KAPELL_TEST_NEW'))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "kept None"


def test_a_thread_of_the_caller_sees_the_process_only(group):
    seen = []
    thread = threading.Thread(target=lambda: seen.append(os.environ.get("RANK")))
    thread.start()
    thread.join()
    assert seen == [None]


def test_a_variable_that_is_no_string_is_refused(group):
    with pytest.raises(ExceptionGroup, match="str expected"):
        group.wrong()


def test_a_worker_outside_any_group_says_what_is_missing():
    with pytest.raises(RuntimeError, match="RANK and WORLD_SIZE"):
        Worker()
