"""Seeds of the ranks of a job."""

import hashlib

__all__ = ["replica_seed"]


def replica_seed(base: int | None, *, dp_rank: int, stream: str = "rollout") -> int | None:
    """A 63-bit seed for one data-parallel replica; None stays None (unseeded).

    Different for each replica, so that they do not sample the same answers, and equal for all ranks within one (tensor
    parallel peers must draw alike, so their rank is not asked for). `stream` keeps the uses of one base apart.
    """
    if base is None:
        return None
    digest = hashlib.sha256(f"{stream}:{base}:{dp_rank}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
