import pickle
import threading

import pytest

from kapell.workergroup import PackedError, RankContext, RemoteError, WorkerFailedError, pack_error


class Odd(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first}-{second}")
        self.first = first


class Slotted(ValueError):
    def __reduce__(self):
        return type(self), self.args


class Broken(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def _raised(error, cause=None):
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def _travelled(error):
    return pickle.loads(pickle.dumps(pack_error(_raised(error)))).unpack()


@pytest.mark.parametrize(
    "error", [ValueError("text", 2), Odd(1, 2), Slotted("x"), OSError(2, "no file"), KeyError("k")]
)
def test_exceptions_arrive_as_themselves_with_their_traceback(error):
    back = _travelled(error)
    assert type(back) is type(error)
    assert (str(back), back.args) == (str(error), error.args)
    assert getattr(back, "first", None) == getattr(error, "first", None)
    assert "test_transport.py" in back.__notes__[-1]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt("stop")])
def test_what_ends_a_process_arrives_as_an_exception(error):
    back = _travelled(error)
    assert isinstance(back, RemoteError)
    assert back.type_name == type(error).__name__


def test_what_cannot_be_pickled_arrives_as_text():
    error = ValueError("holds a lock")
    error.lock = threading.Lock()
    back = _travelled(error)
    assert isinstance(back, RemoteError)
    assert str(back).startswith("ValueError: holds a lock\n")
    assert "test_transport.py" in str(back)


def test_a_faulty_text_hides_no_error():
    assert isinstance(_travelled(Broken()), Broken | RemoteError)


def test_a_class_that_the_receiver_lacks_arrives_as_text():
    packed = pack_error(_raised(ValueError("x")))
    assert isinstance(PackedError(b"not a pickle", packed.stand_in).unpack(), RemoteError)


def test_the_cause_is_in_the_text():
    packed = pack_error(_raised(ValueError("after"), KeyError("before")))
    assert "KeyError: 'before'" in packed.unpack().__notes__[-1]


def test_a_failure_inside_a_failure_survives_pickling():
    inner = _failure("inner", ValueError("deep"))
    outer = pickle.loads(pickle.dumps(_failure("outer", inner)))
    assert outer.contexts[0].role == "outer"
    (nested,) = outer.exceptions
    assert isinstance(nested, WorkerFailedError)
    assert nested.contexts[0].role == "inner"
    selected, rest = outer.split(ValueError)
    assert rest is None
    assert [context.rank for context in selected.contexts] == [4]


def test_pickling_twice_repeats_no_note():
    once = pickle.loads(pickle.dumps(_failure("role", _raised(ValueError("x")))))
    twice = pickle.loads(pickle.dumps(once))
    assert len(twice.exceptions[0].__notes__) == len(once.exceptions[0].__notes__) == 2


def _failure(role, error):
    context = RankContext(role, 4, "method")
    return WorkerFailedError.of([(context, error)], world_size=8, results={0: "fine"}, unfinished=[5])
