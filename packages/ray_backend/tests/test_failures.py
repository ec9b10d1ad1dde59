import pickle
import threading

from kapell.ray_backend.failures import leaving_error
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


def test_an_exception_that_holds_a_lock_arrives_as_text():
    error = LocalError("a", "b")
    error.lock = threading.Lock()
    back = arrived(error)
    assert type(back) is RemoteError
    assert (back.type_name, back.message) == ("LocalError", "a-b")
    assert "in arrived" in back.traceback_text


def test_a_call_to_leave_the_process_arrives_as_text():
    assert type(arrived(SystemExit(3))) is RemoteError
