"""Where the ranks of a group meet: an address, and a port that stays claimed until rank 0 listens on it."""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Iterable
from types import TracebackType
from typing import Self

__all__ = ["PortClaim", "PortUnavailableError", "claim_port"]

_BUSY = (errno.EADDRINUSE, errno.EACCES)
# Linux lets a server that asks for SO_REUSEADDR (as torch's TCPStore does) listen on a port that is only held.
_CAN_HOLD = sys.platform == "linux"


class PortUnavailableError(OSError):
    """No port of those asked for is free on this host."""

    def __init__(self, ports: str, host: str) -> None:
        super().__init__(ports, host)
        self.ports = ports
        self.host = host

    def __str__(self) -> str:
        return f"no free port on {self.host} among {self.ports}; free one, or give another master_port_range"


class PortClaim:
    """A port that no other claim and no automatic choice of the system gets while this object is open.

    The socket is bound but does not listen, so a server that sets ``SO_REUSEADDR`` can take the port over at any time.
    """

    def __init__(self, holder: socket.socket) -> None:
        self._holder = holder
        self.port: int = holder.getsockname()[1]
        if _CAN_HOLD:
            # Only now: a second claim binds without it and is therefore refused.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def release_for_server(self) -> None:
        """Called just before a server starts: lets go where the system cannot share a held port."""
        if not _CAN_HOLD:
            self.close()

    def close(self) -> None:
        """Give the port back. Harmless when repeated."""
        self._holder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def claim_port(candidates: range | Iterable[int] | None = None) -> PortClaim:
    """Claim the first free port of ``candidates``, or any free port when None.

    Raises `PortUnavailableError` when all are taken.

    >>> with claim_port() as claim:
    ...     claim.port > 0
    True
    """
    for port in (0,) if candidates is None else candidates:
        holder = _bind(port)
        if holder is not None:
            return PortClaim(holder)
    raise PortUnavailableError(_described(candidates), socket.gethostname())


def _bind(port: int) -> socket.socket | None:
    """A socket bound to the port on all addresses of both families, as torch's store binds; None when it is taken."""
    if socket.has_dualstack_ipv6():
        holder, address = socket.socket(socket.AF_INET6), "::"
        holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    else:
        holder, address = socket.socket(socket.AF_INET), ""
    try:
        holder.bind((address, port))
    except OSError as error:
        holder.close()
        if error.errno in _BUSY:
            return None
        raise
    return holder


def _described(candidates: range | Iterable[int] | None) -> str:
    if isinstance(candidates, range) and len(candidates) > 1:
        return f"ports {candidates.start} to {candidates.stop - 1}"
    ports = list(candidates or ())
    if len(ports) == 1:
        return f"port {ports[0]}"
    return f"ports {ports}"
