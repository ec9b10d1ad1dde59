"""Joining a running Ray, or starting one on this machine; which session of Ray this program is in."""

from __future__ import annotations

import ipaddress
import logging
import math
import os
import socket
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import ray

from .variables import default_variable

__all__ = ["EndedSessionError", "check_cluster", "check_session", "ensure_ray", "this_session"]

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_SPARE_LOGICAL_CPUS = 16  # on a laptop a CPU is a place for a process, not a core: roles outnumber cores
_ANSWER_SECONDS = 5.0  # for a head node to accept a connection; Ray itself asks for minutes


class EndedSessionError(RuntimeError):
    """What is asked for something lived in a session of Ray that this program has left, with ``ray.shutdown()``."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return f"{self.what} ended with the Ray session that it was made in (ray.shutdown); make it anew in this one"


def this_session() -> tuple[str, str] | None:
    """Names this program's connection to Ray, if it has one: jobs are numbered anew in each cluster."""
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()


def check_session(session: tuple[str, str] | None, what: str) -> None:
    """Raise `EndedSessionError` when ``what`` is of another session than this program is in.

    To be asked before Ray is: with none running, it would start one, and actors of an ended one take the program down.
    """
    if session != this_session():
        raise EndedSessionError(what)


def check_cluster(origin: tuple[str, str] | None, what: str) -> None:
    """Raise `EndedSessionError` when ``what`` was sent from a session of another cluster: Ray would wait forever."""
    here = this_session()
    if origin != here and (origin is None or here is None or origin[0] not in _nodes(origin, here)):
        raise EndedSessionError(what)


@lru_cache(maxsize=64)  # a worker is sent futures by the same few programs all the time
def _nodes(origin: tuple[str, str], here: tuple[str, str]) -> frozenset[str]:
    """The nodes of ``here``, also those that are gone, as they are when something comes from ``origin`` first."""
    return frozenset(node["NodeID"] for node in ray.nodes())


def ensure_ray(
    *,
    address: str = "auto",
    num_cpus: int | None = None,
    needed_cpus: float = 0,
    dashboard: bool = False,
    namespace: str | None = None,
    **options: Any,
) -> bool:
    """Join the Ray at ``address``; by default the one in ``RAY_ADDRESS`` or on this machine, else start one here.

    A Ray started here has ``num_cpus`` logical CPUs; when that is not given, as many as the machine, and at least 16
    beside the ``needed_cpus`` of pools that are to fit. With ``dashboard`` it has one, which needs ``ray[default]``. It
    stays on the loopback interface, except where Ray was imported before this package; then the log says where it
    listens. Its store frees at once what nothing refers to. ``address="local"`` starts one in any case. ``options`` go
    to ``ray.init``.

    False when this process was connected already. Raises ``ConnectionError`` when nothing answers at an address that
    was named.
    """
    if ray.is_initialized():
        return False
    options = {"logging_level": logging.WARNING, "namespace": namespace, **options}
    named = address if address != "auto" else os.environ.get("RAY_ADDRESS") or "auto"
    if named != "local" and _joined(named, address, options):
        return True
    cpus = num_cpus or max(os.cpu_count() or 1, math.ceil(needed_cpus) + _SPARE_LOGICAL_CPUS)
    logger.info("no Ray is running; starting one with %d logical CPUs", cpus)
    # One node frees its store at no cost. Ray would wait for a hundred objects, or a second, and take fresh pages for
    # each call in between, which costs several times the copying.
    with default_variable("RAY_free_objects_batch_size", "1"):
        ray.init(address="local", num_cpus=cpus, include_dashboard=dashboard, _node_ip_address=_LOOPBACK, **options)
    _say_where_it_listens()
    return True


def _joined(named: str, address: str, options: dict[str, Any]) -> bool:
    """Join what is named; where nothing is, whatever runs on this machine, if anything does."""
    if named != "auto":
        if silence := _silence_of(named):
            # Starting another one here would hide that the cluster is not there.
            source = "" if named == address else ", which RAY_ADDRESS names"
            raise ConnectionError(
                f"no Ray answers at {named}{source} ({silence}); start it there with `ray start --head`, or name none "
                f"to have one started on this machine"
            )
        try:
            ray.init(address=address, **options)
        except ConnectionError as error:
            error.add_note(
                f"something listens at {named}; Ray since 2.59 asks for a token unless it was told "
                "otherwise: set RAY_AUTH_MODE=token"
            )
            raise
        return True
    # Ray would try for minutes to reach what a killed one has left in its file.
    left = _address_left_by_ray_start(options.get("_temp_dir"))
    if left and (silence := _silence_of(left)):
        logger.warning("nothing answers at %s, where a Ray ran on this machine before (%s)", left, silence)
        return False
    try:
        ray.init(address="auto", **options)
    except ConnectionError:
        return False
    return True


def _address_left_by_ray_start(folder: str | None) -> str:
    """What `ray start` has written down and `ray stop` removes; empty without it."""
    # Ray on macOS keeps to /tmp, whatever TMPDIR says.
    system = "/tmp" if sys.platform == "darwin" else tempfile.gettempdir()
    path = Path(folder or Path(os.environ.get("RAY_TMPDIR", system)) / "ray") / "ray_current_cluster"
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _silence_of(address: str) -> str:
    """Why nobody answers at ``host:port``; empty when somebody does, or when the address has another form."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        return ""  # for Ray to judge
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS).close()
    except OSError as error:
        return str(error)
    return ""


def _say_where_it_listens() -> None:
    """Ray replaces a loopback address by the machine's own, unless it was imported by this package."""
    address = ray.util.get_node_ip_address()
    if ipaddress.ip_address(address.strip("[]")).is_loopback:
        return
    guarded = os.environ.get("RAY_AUTH_MODE", "").lower() == "token"
    logger.log(
        logging.INFO if guarded else logging.WARNING,
        "Ray %s listens at %s and asks whoever connects %s; to keep it on the loopback interface, import "
        "kapell.ray_backend before ray, or set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 before Python starts",
        ray.__version__, address, "for a token" if guarded else "nothing",
    )  # fmt: skip
