import pickle
import threading

import pytest

from kapell.workergroup import (
    BusyRank,
    CallTimeoutError,
    PackedError,
    RankContext,
    RemoteError,
    WorkerFailedError,
    pack_error,
)


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


class OddDecodeError(UnicodeDecodeError):
    def __init__(self, data):
        super().__init__("utf-8", data, 0, 1, "odd")
        self.data = data


class OddSystemError(OSError):
    def __init__(self, disk):
        super().__init__(28, f"{disk} is full")
        self.disk = disk


class OddImportError(ImportError):
    def __init__(self, package):
        super().__init__(f"install {package} with", name=package)


class InSlots(Exception):
    __slots__ = ("code", "nothing", "unset")

    def __init__(self, text, code):
        super().__init__(text)
        self.code = code
        self.nothing = None


class ByConstructor(Exception):
    """Keeps its text where only its constructor puts it."""

    def __init__(self, key):
        super().__init__(key)
        _texts[id(self)] = f"text of {key}"

    def __str__(self):
        return _texts[id(self)]


_texts = {}


def _name_error():
    try:
        return undefined_name
    except NameError as error:
        return error


def _syntax_error():
    try:
        compile("(", "script.py", "exec")
    except SyntaxError as error:
        return error


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (UnicodeDecodeError("utf-8", b"ab\xff", 2, 3, "bad"), ["encoding", "object", "start", "end", "reason"]),
        (UnicodeEncodeError("ascii", "\xe4", 0, 1, "bad"), ["encoding", "object", "start", "end", "reason"]),
        (_syntax_error(), ["msg", "filename", "lineno", "offset", "text"]),
        (StopIteration({"a": 1}), ["value"]),
        (_name_error(), ["name"]),
        (AttributeError("no x", name="x", obj=threading.Lock()), ["name"]),
        (ImportError("no module", name="x", path="y"), ["name", "path"]),
        (OSError(2, "no file", "name"), ["errno", "strerror", "filename", "filename2"]),
        (OSError(2, "no file"), ["errno", "strerror", "filename"]),
        (BlockingIOError(11, "full", 5), ["errno", "characters_written"]),
        (OddSystemError("disk"), ["errno", "disk"]),
        (OddImportError("torch"), ["name", "msg"]),
        (CallTimeoutError("role", "method", 3.0, {1: BusyRank(0.0, 3.0, "role.method")}, {0: 5}), ["busy", "results"]),
        (OddDecodeError(b"\xff"), ["data", "start", "reason"]),
        (InSlots("text", 7), ["code", "nothing"]),
        (ExceptionGroup("two", [StopIteration(1), ValueError("x")]), ["message"]),
        (ByConstructor("k"), []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_exceptions_keep_beside_their_arguments_arrives_too(error, state):
    back = _travelled(error)
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert [getattr(back, name) for name in state] == [getattr(error, name) for name in state]
    assert not hasattr(back, "unset")


def test_a_timeout_survives_pickling():
    error = CallTimeoutError("role", "method", 3.0, {1: BusyRank(0.0, 3.0, "role.method")}, {0: 5})
    back = pickle.loads(pickle.dumps(error))
    assert (str(back), back.busy, back.results) == (str(error), error.busy, error.results)


def test_parts_of_a_group_keep_what_they_hold():
    back = _travelled(ExceptionGroup("two", [StopIteration(1), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad")]))
    assert back.exceptions[0].value == 1
    assert back.exceptions[1].start == 0


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
