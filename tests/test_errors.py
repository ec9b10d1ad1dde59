"""Every public error travels as itself, from whichever package it is."""

import pickle

import pytest

import kapell.decorators
import kapell.protocol
import kapell.ray_backend
import kapell.workergroup
from kapell.protocol import BatchFileError, ReadOnlyError, SchemaError, UnsafeValueError
from kapell.ray_backend import (
    BusyWorkersError,
    EndedSessionError,
    InfeasiblePoolError,
    LostBatchError,
    PlacementTimeoutError,
    PortUnavailableError,
    StartTimeoutError,
    StoreFullError,
)
from kapell.ray_backend.preflight import NodeResources, PoolRequest
from kapell.workergroup import (
    BackendNotFoundError,
    BusyRank,
    CallTimeoutError,
    GroupClosedError,
    KapellError,
    LostWorker,
    NotRegisteredError,
    PackedError,
    RankContext,
    RemoteError,
    WorkerFailedError,
    WorkerLostError,
)

BUSY = {1: BusyRank(0.0, 3.0, "role.method")}
FAILED = "role.method failed", [ValueError("no")], [RankContext("role", 1, "method", rows=3)]
REQUEST, NODES = PoolRequest((2, 1), {"CPU": 1.0}), [NodeResources("10.0.0.1", {"CPU": 2.0})]
ERRORS = [
    BackendNotFoundError("rya", ["local", "ray"]),
    BatchFileError("rows.kapell", "it is cut short"),
    BusyWorkersError("role", 3.0, ["one", "two"]),
    CallTimeoutError("role", "method", 3.0, BUSY, {0: [5]}),
    EndedSessionError("pool 'a'"),
    GroupClosedError("role"),
    InfeasiblePoolError("too few CPUs", REQUEST, NODES),
    KapellError("text"),
    LostBatchError("rank 1 of role", "OwnerDiedError"),
    LostWorker("killed", "10.0.0.1"),
    NotRegisteredError("step", "Actor", True, ["update"]),
    PackedError(None, RemoteError("ValueError", "no", "trace")),
    PlacementTimeoutError(3.0, 1, REQUEST, NODES, "0 CPU"),
    PortUnavailableError("8000 to 8001", "10.0.0.1"),
    ReadOnlyError("add_"),
    RemoteError("ValueError", "no", "trace"),
    SchemaError(["column 'a': missing", "column 'b': not expected"]),
    StartTimeoutError("role", "__init__", 3.0, [0, 2]),
    StoreFullError("a result", 10_000_000, "10.0.0.1", 5_000_000, "OutOfDiskError"),
    UnsafeValueError("column 'a', row 1", "Thing"),
    WorkerFailedError(*FAILED, results={0: [5]}, unfinished=[2]),
    WorkerLostError(*FAILED, results={0: [5]}),
]


def test_every_public_error_is_tried_here():
    packages = (kapell.decorators, kapell.protocol, kapell.workergroup, kapell.ray_backend)
    public = [getattr(package, name) for package in packages for name in package.__all__]
    errors = {value for value in public if isinstance(value, type) and issubclass(value, BaseException)}
    assert {type(error) for error in ERRORS} == errors


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_keep_text_fields_and_notes_when_pickled(error):
    error.add_note("a note")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert repr(vars(back)) == repr(vars(error))


@pytest.mark.parametrize(
    "error",
    [
        CallTimeoutError("role", "method", 3.0, BUSY, {0: lambda: 5, 2: 7}),
        WorkerFailedError(*FAILED, results={0: lambda: 5, 2: 7}),
    ],
    ids=lambda error: type(error).__name__,
)
def test_results_that_cannot_be_pickled_are_left_out_when_an_error_is(error):
    back = pickle.loads(pickle.dumps(error))
    assert back.results == {2: 7}
    assert list(error.results) == [0, 2]
