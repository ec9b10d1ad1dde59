"""The program inside the sandbox: shuts the door behind itself, then runs code that nobody has read.

It is started by `kapell.trainer.sandbox` as a script, in isolated mode, and imports the standard library only. Its one
argument names two inherited file descriptors: a request as JSON is read from the first, and the answers go to the
second, one line each.
"""

from __future__ import annotations

import builtins
import ctypes
import json
import os
import resource
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["confine", "main"]

# From Linux's uapi headers; they are part of its stable interface.
_CLONE_NEWUSER, _CLONE_NEWNET, _CLONE_NEWIPC = 0x10000000, 0x40000000, 0x08000000
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2
_SECCOMP_ALLOW, _SECCOMP_ERRNO_EPERM, _SECCOMP_KILL_PROCESS = 0x7FFF0000, 0x00050001, 0x80000000
_LANDLOCK_CREATE, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT = 444, 445, 446  # the same on every architecture
_LANDLOCK_READ = 0b1101  # execute, read a file, read a folder
_LANDLOCK_READ_FILE = 0b0101
_LANDLOCK_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # version of the interface: number of rights on files
_LANDLOCK_TRUNCATES = 3  # before it, files that may not be written could be emptied
_LANDLOCK_NO_TCP, _LANDLOCK_NO_SIGNALS = 0b11, 0b11  # bind and connect; abstract sockets and signals
_CAPABILITY_VERSION_3 = 0x20080522
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000
# Processes and threads, programs, sockets (io_uring makes them too), other processes' memory, signals to others, their
# priorities and places; namespaces, in which a process would get back the rights it gave up; modes, owners, times and
# attributes of files, over which Landlock has no say; and memory that no limit counts or that outlives the process.
_FORBIDDEN_CALLS = {
    "x86_64": {
        *(56, 57, 58, 435),  # clone, fork, vfork, clone3
        *(59, 322),  # execve, execveat
        *(41, 425, 426, 427),  # socket, io_uring_*
        *(101, 310, 311, 438),  # ptrace, process_vm_readv, process_vm_writev, pidfd_getfd
        *(62, 200, 234, 424, 129, 297),  # kill, tkill, tgkill, pidfd_send_signal, rt_sigqueueinfo, rt_tgsigqueueinfo
        *(141, 142, 144, 203, 314, 251, 256, 279, 434),  # setpriority, sched_setparam, sched_setscheduler,
        # sched_setaffinity, sched_setattr, ioprio_set, migrate_pages, move_pages, pidfd_open
        *(272, 308, 165, 298, 321, 323, 250),  # unshare, setns, mount, perf_event_open, bpf, userfaultfd, keyctl
        *(90, 91, 268, 452, 92, 93, 94, 260),  # chmod, fchmod, fchmodat, fchmodat2, chown, fchown, lchown, fchownat
        *(132, 235, 261, 280),  # utime, utimes, futimesat, utimensat
        *(188, 189, 190, 197, 198, 199, 463, 466),  # setxattr, l-, f-, removexattr, l-, f-, setxattrat, removexattrat
        *(29, 64, 68, 240, 319),  # shmget, semget, msgget, mq_open, memfd_create
    },
    "aarch64": {
        *(220, 435),
        *(221, 281),
        *(198, 425, 426, 427),
        *(117, 270, 271, 438),
        *(129, 130, 131, 424, 138, 240),
        *(140, 118, 119, 122, 274, 30, 238, 239, 434),
        *(97, 268, 40, 241, 280, 282, 219),
        *(52, 53, 452, 54, 55),
        *(88,),
        *(5, 6, 7, 14, 15, 16, 463, 466),
        *(194, 190, 186, 180, 279),
    },
}

# Calls of which one argument decides, by number: its place, and the values with which alone they are allowed (limits of
# this process, prlimit64) or with which they are not (the ways of fcntl and ioctl to have signals sent to others).
_ALLOWED_WITH = {"x86_64": {302: (0, (0,))}, "aarch64": {261: (0, (0,))}}
_OWNERS = {"fcntl": (1, (8, 10, 15)), "ioctl": (1, (0x8901, 0x8902))}
_FORBIDDEN_WITH = {
    "x86_64": {72: _OWNERS["fcntl"], 16: _OWNERS["ioctl"]},
    "aarch64": {25: _OWNERS["fcntl"], 29: _OWNERS["ioctl"]},
}


def confine(limits: Mapping[str, int], folder: str, libraries: Sequence[str]) -> list[str]:
    """Give up, for good, every right that computing needs none of.

    Files are left in ``folder``, and for reading in ``libraries`` and where this interpreter imports from. Returns
    which of ``network``, ``files`` and ``processes`` the system could close.
    """
    closed = set()
    libc = ctypes.CDLL(None)
    if sys.platform == "linux":
        libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWIPC)  # a second wall, where allowed
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if _landlock(libc, folder, libraries):
            closed.add("files")
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}", None)
        if kind is not None:
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))
    if sys.platform == "linux":
        header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
        libc.capset(header, bytes(24))  # limits bind root too, once it has no capabilities
        machine = os.uname().machine
        if machine in _AUDIT_ARCH and _seccomp(libc, machine):
            closed |= {"network", "processes"}
    return sorted(closed)


def _landlock(libc: Any, folder: str, libraries: Sequence[str]) -> bool:
    version = libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        return False
    rights = (1 << _LANDLOCK_RIGHTS.get(version, 16)) - 1
    attributes = struct.pack(
        "QQQ", rights, _LANDLOCK_NO_TCP if version >= 4 else 0, _LANDLOCK_NO_SIGNALS if version >= 6 else 0
    )
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = libc.syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(size), 0)
    if rules < 0:
        return False
    allowed = dict.fromkeys((*sys.path, *libraries), _LANDLOCK_READ)
    allowed |= dict.fromkeys(("/dev/null", "/dev/urandom", "/etc/ld.so.cache"), _LANDLOCK_READ_FILE)
    for path, access in {**allowed, folder: rights}.items():
        if path and os.path.exists(path):
            handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
            libc.syscall(_LANDLOCK_ADD_RULE, rules, 1, struct.pack("=Qi", access & rights, handle), 0)
            os.close(handle)
    done = libc.syscall(_LANDLOCK_RESTRICT, rules, 0) == 0
    os.close(rules)
    return done and version >= _LANDLOCK_TRUNCATES


def _seccomp(libc: Any, machine: str) -> bool:
    """A filter in the kernel that answers the forbidden system calls with "not permitted"."""
    arch = _AUDIT_ARCH[machine]
    load, equal, above, give = 0x20, 0x15, 0x35, 0x06  # BPF: load a word, jump if ==, jump if >=, return
    program = [(load, 0, 0, 4), (equal, 1, 0, arch), (give, 0, 0, _SECCOMP_KILL_PROCESS), (load, 0, 0, 0)]
    program += [(above, 0, 1, _X32_BIT), (give, 0, 0, _SECCOMP_KILL_PROCESS)]
    for number in sorted(_FORBIDDEN_CALLS[machine]):
        program += [(equal, 0, 1, number), (give, 0, 0, _SECCOMP_ERRNO_EPERM)]
    for calls, listed, other in (
        (_ALLOWED_WITH, _SECCOMP_ALLOW, _SECCOMP_ERRNO_EPERM),
        (_FORBIDDEN_WITH, _SECCOMP_ERRNO_EPERM, _SECCOMP_ALLOW),
    ):
        for number, (place, values) in calls[machine].items():
            tests = [(load, 0, 0, 16 + 8 * place)]  # the lower half of the argument, which is all that these calls read
            for value in values:
                tests += [(equal, 0, 1, value), (give, 0, 0, listed)]
            tests.append((give, 0, 0, other))
            program += [(equal, 0, len(tests), number), *tests]
    program.append((give, 0, 0, _SECCOMP_ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    pointer = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code))
    return libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, pointer, 0, 0) == 0


def _run(request: Mapping[str, Any], answer: Callable[[Mapping[str, Any]], None]) -> None:
    # What stands under `if __name__ == "__main__":` is for programs, not for functions that are called.
    name = "solution" if request["calls"] else "__main__"
    scope: dict[str, Any] = {"__name__": name, "__builtins__": builtins}
    exec(compile(request["code"], "<code>", "exec"), scope)
    for call in request["calls"]:
        try:
            value = eval(compile(call, "<test>", "eval"), scope)
            answer({"value": repr(value)})
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})


def main() -> None:
    """Read a request, confine this process, run the code and then each call in its namespace."""
    reading, writing = (int(number) for number in sys.argv[1].split(","))
    with os.fdopen(reading, "rb") as file:
        request = json.load(file)
    out = os.fdopen(writing, "w", encoding="utf-8", errors="backslashreplace")

    def answer(line: Mapping[str, Any]) -> None:
        out.write(json.dumps(line) + "\n")
        out.flush()

    sys.argv = ["code.py"]
    closed = confine(request["limits"], request["folder"], request["libraries"])
    answer({"closed": closed})
    if set(request["required"]) <= set(closed):
        _run(request, answer)


if __name__ == "__main__":
    main()
