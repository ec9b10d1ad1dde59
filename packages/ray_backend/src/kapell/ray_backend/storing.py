"""Putting values into Ray's object store, and what is said when neither the store nor the disk behind it has room."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError

from kapell.workergroup import KapellError

__all__ = ["NO_ROOM", "StoreFullError", "put_value", "store_full"]

NO_ROOM = (ObjectStoreFullError, OutOfDiskError)
"""What Ray raises then: it spills to disk before it gives up, so the disk is usually full, too."""
_MB = 1_000_000


class StoreFullError(KapellError, MemoryError):
    """A value has room neither in Ray's object store nor on the disk that the store spills to."""

    def __init__(self, what: str, nbytes: int, node: str, capacity: int, reason: str) -> None:
        super().__init__(what, nbytes, node, capacity, reason)
        self.what = what
        self.nbytes = nbytes
        """Size of the value; 0 when nobody knows it any more."""
        self.node = node
        self.capacity = capacity
        """Size of the node's store; 0 when the node is gone."""
        self.reason = reason

    def __str__(self) -> str:
        size = f"of {self.nbytes / _MB:,.1f} MB" if self.nbytes else "of unknown size"
        store = f"of {self.capacity / _MB:,.1f} MB" if self.capacity else "of unknown size"
        return (
            f"{self.what} {size} has no room in the object store {store} on node {self.node} ({self.reason}); send or "
            f"return fewer rows at a time, let go of results that are no longer needed, free the disk under Ray's "
            f"temporary folder, or start Ray with a larger object_store_memory"
        )


def put_value(value: Any, what: str) -> ray.ObjectRef:
    """``ray.put`` of what `shipped` made. Raises `StoreFullError` when there is no room."""
    try:
        return ray.put(value)
    except NO_ROOM as error:
        nbytes = getattr(value, "nbytes", 0)
        raise store_full(error, what, nbytes, ray.get_runtime_context().get_node_id()) from None


def store_full(error: Exception, what: str, nbytes: int, node_id: str) -> StoreFullError:
    """The error for a value that ``node_id``'s store did not take."""
    found = [node for node in ray.nodes() if node["NodeID"] == node_id]
    capacity = int(found[0]["Resources"].get("object_store_memory", 0)) if found else 0
    node = f"{found[0]['NodeManagerAddress']} ({node_id[:6]})" if found else node_id[:6] or "unknown"
    reason = str(error).strip().splitlines()[0].rstrip(".:")
    return StoreFullError(what, nbytes, node, capacity, reason)
