import pickle
import threading

import pytest

from kapell.ray_backend import BusyWorkersError, PlacementTimeoutError, StartTimeoutError
from kapell.ray_backend.failures import leaving_error
from kapell.ray_backend.preflight import NodeResources, PoolRequest
from kapell.workergroup import RemoteError


class LocalError(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first}-{second}")
        self.first = first


def arrived(error):
    try:
        raise error
    except BaseException as raised:
        return pickle.loads(pickle.dumps(leaving_error(raised))).unpack()


def test_an_exception_of_a_script_arrives_as_itself_with_its_traceback():
    class OnlyHere(ValueError):
        pass

    error = arrived(OnlyHere("text"))
    assert type(error) is OnlyHere
    assert "in arrived" in "".join(error.__notes__)


def test_an_unusual_constructor_is_no_hindrance():
    class OnlyHere(LocalError):
        pass

    error = arrived(OnlyHere("a", "b"))
    assert (type(error), str(error), error.first) == (OnlyHere, "a-b", "a")


def test_what_a_class_in_c_keeps_arrives_with_an_exception_of_a_script():
    class OnlyHere(UnicodeDecodeError):
        def __init__(self, data):
            super().__init__("utf-8", data, 0, 1, "odd")
            self.data = data

    error = arrived(OnlyHere(b"\xff"))
    assert type(error) is OnlyHere
    assert (error.data, error.start, error.reason) == (b"\xff", 0, "odd")
    assert str(error) == "'utf-8' codec can't decode byte 0xff in position 0: odd"


def test_an_exception_that_holds_a_lock_arrives_as_text():
    error = LocalError("a", "b")
    error.lock = threading.Lock()
    back = arrived(error)
    assert type(back) is RemoteError
    assert (back.type_name, back.message) == ("LocalError", "a-b")
    assert "in arrived" in back.traceback_text


@pytest.mark.parametrize(
    "error",
    [
        StartTimeoutError("role", "__init__", 3.0, [1, 2]),
        PlacementTimeoutError(
            3.0, 0, PoolRequest((1,), {"CPU": 1.0}, "PACK"), [NodeResources("n", {"CPU": 1.0})], "1 CPU"
        ),
        BusyWorkersError("role", 3.0, ["a", "b"]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_about_time_arrive_from_workers_that_have_groups_of_their_own(error):
    for back in (arrived(error), pickle.loads(pickle.dumps(error))):
        assert type(back) is type(error)
        assert str(back) == str(error)


def test_a_call_to_leave_the_process_arrives_as_text():
    assert type(arrived(SystemExit(3))) is RemoteError
