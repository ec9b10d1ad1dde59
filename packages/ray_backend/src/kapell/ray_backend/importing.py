"""Which modules a worker process can import: what it cannot is sent to it by value."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder

from ray import cloudpickle

__all__ = ["can_workers_import", "send_by_value_if_needed"]

_decided: set[str] = set()


def send_by_value_if_needed(module_name: str | None) -> None:
    """Have classes and functions of the module pickled by value from now on, if workers could not import it.

    Such are a test file that pytest loaded by path, and a reward function's file loaded under a made-up name.
    """
    if not module_name or module_name in _decided:
        return
    _decided.add(module_name)
    module = sys.modules.get(module_name)
    # cloudpickle itself sends __main__ by value.
    if module is None or module_name in ("__main__", "builtins") or can_workers_import(module_name):
        return
    if getattr(module, "__file__", None) is not None:
        cloudpickle.register_pickle_by_value(module)


def can_workers_import(module_name: str) -> bool:
    """Whether a fresh worker would find the module; imports nothing."""
    path: list[str] | None = None
    parts = module_name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = _find(".".join(parts[:depth]), path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
        path = None if path is None else list(path)
    file = getattr(sys.modules.get(module_name), "__file__", None)
    return file is None or spec.origin is None or os.path.realpath(file) == os.path.realpath(spec.origin)


def _find(name: str, path: list[str] | None):
    for finder in sys.meta_path:
        # pytest's hook finds test files that only this process knows.
        if getattr(finder, "__module__", type(finder).__module__).startswith("_pytest"):
            continue
        if finder is PathFinder:
            spec = PathFinder.find_spec(name, _worker_path() if path is None else path)
        else:
            spec = finder.find_spec(name, path)
        if spec is not None:
            return spec
    return None


def _worker_path() -> list[str]:
    """The import path of a worker as Ray makes it: interpreter's own, PYTHONPATH, folder of the script, current one."""
    given = [os.path.realpath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    cwd = os.path.realpath(os.curdir)
    script = os.path.dirname(os.path.realpath(sys.argv[0])) if sys.argv and sys.argv[0] else cwd
    own = {*given, cwd, script, *_SITE_PATH}
    return [cwd, *(entry for entry in sys.path if os.path.realpath(entry or os.curdir) in own)]


def _interpreter_path() -> frozenset[str]:
    """What a bare interpreter of this environment has on its path: library, site-packages and what .pth files add."""
    roots = {os.path.realpath(root) for root in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    inside = {entry for entry in map(os.path.realpath, sys.path) if any(entry.startswith(root) for root in roots)}
    added = set()
    for folder in inside:
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            if name.endswith(".pth"):
                with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as lines:
                    added |= {
                        os.path.realpath(os.path.join(folder, line.strip()))
                        for line in lines
                        if line.strip() and not line.startswith(("import", "#"))
                    }
    return frozenset(inside | added)


_SITE_PATH = _interpreter_path()
