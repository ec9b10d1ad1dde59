"""What model-written code can and cannot do; each hostile program here would succeed in a plain subprocess."""

import os
import resource
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from kapell.trainer import sandbox_child
from kapell.trainer.sandbox import SandboxLimits, SandboxStartError, SandboxUnavailableError, run_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can confine a process without privileges")

QUICK = SandboxLimits(seconds=1.0)  # where time runs out on purpose
PATIENT = SandboxLimits(seconds=60.0)


def test_a_program_reads_its_input_and_prints():
    result = run_python("print(input()[::-1])", stdin="1234\n")
    assert (result.stdout, result.ended, result.status) == ("4321\n", "exit", 0)
    assert set(result.closed) == {"files", "network", "processes"}


def test_calls_are_answered_one_by_one_and_an_error_is_an_answer():
    result = run_python("def half(x): return 10 / x", calls=["half(4)", "half(0)", "nowhere", "half(5)"])
    assert result.answers == [
        {"value": "2.5"},
        {"error": "ZeroDivisionError: division by zero"},
        {"error": "NameError: name 'nowhere' is not defined"},
        {"value": "2.0"},
    ]


def test_an_endless_loop_ends_at_the_time_limit_and_keeps_earlier_answers():
    started = time.monotonic()
    result = run_python("def f(x):\n  while x: pass\n  return x", calls=["f(0)", "f(1)", "f(0)"], limits=QUICK)
    assert result.ended == "time"
    assert result.answers == [{"value": "0"}]
    assert time.monotonic() - started < 30


def test_sleeping_counts_as_time():
    assert run_python("import time; time.sleep(60)", limits=QUICK).ended == "time"


def test_handlers_cannot_outlive_the_limit():
    stubborn = "import signal\nfor n in (2, 15, 24):\n  signal.signal(n, signal.SIG_IGN)\nwhile True:\n  pass"
    result = run_python(stubborn, limits=QUICK)
    assert (result.ended, result.status) in {("time", -9), ("signal", -9)}


def test_no_process_is_left_behind_by_a_fork_bomb():
    before = _num_processes()
    result = run_python("import os\nwhile True:\n  os.fork()", limits=PATIENT)
    assert "PermissionError" in result.stderr or "BlockingIOError" in result.stderr
    assert _num_processes() <= before


@pytest.mark.parametrize(
    "code",
    [
        "import subprocess; subprocess.run(['/bin/true'])",
        "import os; os.execv('/bin/true', ['true'])",
        "import threading; threading.Thread(target=print).start()",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
    ],
)
def test_other_programs_and_threads_cannot_start(code):
    result = run_python(code, limits=PATIENT)
    assert result.status == 1, result
    assert "Error" in result.stderr


def test_a_memory_hog_gets_a_memory_error():
    result = run_python("x = bytearray(4 * 2**30)", limits=PATIENT)
    assert "MemoryError" in result.stderr
    result = run_python("x = 'a'\nwhile True: x += x", limits=SandboxLimits(seconds=60.0, memory=128 * 2**20))
    assert "MemoryError" in result.stderr


def test_nothing_outside_the_folder_can_be_written(tmp_path):
    target = tmp_path / "owned"
    tmp_path.chmod(0o777)
    for attempt in (f"open({str(target)!r}, 'w')", f"import os; os.mkdir({str(target)!r})"):
        assert "PermissionError" in run_python(attempt).stderr
    assert not target.exists()


def test_the_folder_is_new_empty_and_removed_afterwards():
    result = run_python("import os; print(os.listdir()); open('a', 'w').write('b'); print(os.getcwd(), os.listdir())")
    assert result.stdout.startswith("[]\n")
    folder, listing = result.stdout.splitlines()[1].split(" ", 1)
    assert listing == "['a']"
    assert not Path(folder).exists()


def test_a_folder_that_refuses_to_be_read_is_removed_too():
    result = run_python("import os; os.mkdir('a'); open('a/c', 'w'); os.mkdir('a/b', 0); print(os.getcwd())")
    assert not Path(result.stdout.strip()).exists()


def test_a_file_cannot_grow_beyond_its_limit():
    limits = SandboxLimits(max_file=1000)
    result = run_python("f = open('a', 'wb', buffering=0)\nfor _ in range(9): f.write(bytes(400))", limits=limits)
    assert "File too large" in result.stderr or result.ended == "signal"


def test_files_of_the_system_and_of_the_user_cannot_be_read(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("token")
    for path in (str(secret), "/etc/passwd", __file__):
        result = run_python(f"print(open({path!r}).read())")
        assert "PermissionError" in result.stderr
        assert "token" not in result.stdout


@pytest.mark.parametrize(
    "call",
    ["chmod(path, 0o777)", "utime(path)", "chown(path, 0, 0)", "setxattr(path, 'user.a', b'b')", "truncate(path, 0)"],
)
def test_files_outside_keep_their_modes_times_and_contents(tmp_path, call):
    target = tmp_path / "file"
    target.write_text("kept")
    target.chmod(0o600)
    before = target.stat()
    assert "Error" in run_python(f"import os; path = {str(target)!r}; os.{call}").stderr
    assert target.stat() == before
    assert target.read_text() == "kept"


@pytest.mark.parametrize("call", ["os.memfd_create('a')", "ctypes.CDLL(None, use_errno=True).shmget(1, 4096, 0o1600)"])
def test_memory_that_no_limit_counts_cannot_be_had(call):
    result = run_python(f"import ctypes, os; print({call})")
    assert result.stdout == "-1\n" or "PermissionError" in result.stderr


def test_the_environment_is_empty_and_the_parents_cannot_be_read(monkeypatch):
    monkeypatch.setenv("API_KEY", "secret-token")
    code = "import os\nprint(dict(os.environ))\nfor name in ('environ', 'mem', 'maps'):\n"
    code += "  try: print(open(f'/proc/{os.getppid()}/{name}', 'rb').read(1000))\n"
    code += "  except OSError as error: print(type(error).__name__)"
    result = run_python(code)
    assert "secret-token" not in result.stdout
    assert result.stdout.splitlines()[-3:] == ["PermissionError"] * 3


def test_the_parent_cannot_be_signalled_or_traced():
    result = run_python("import os; os.kill(os.getppid(), 9)")
    assert "PermissionError" in result.stderr
    trace = "import ctypes, os; print(ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0))"
    assert run_python(trace).stdout == "-1\n"


@pytest.mark.parametrize(
    "call",
    [
        "resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
        "resource.prlimit(os.getppid(), resource.RLIMIT_CPU)",
        "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
        "os.sched_setaffinity(os.getppid(), {0})",
        "os.sched_setscheduler(os.getppid(), os.SCHED_BATCH, os.sched_param(0))",
        "fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())",
        "fcntl.fcntl(os.pipe()[0], 10, 9)",
        "os.pidfd_open(os.getppid())",
        "import socket, struct; fcntl.ioctl(socket.socketpair()[0], 0x8901, struct.pack('i', os.getppid()))",
    ],
)
def test_limits_and_priorities_of_others_cannot_be_changed(call):
    before = resource.getrlimit(resource.RLIMIT_CPU), os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0)
    assert "PermissionError" in run_python(f"import fcntl, os, resource\n{call}").stderr
    assert before == (
        resource.getrlimit(resource.RLIMIT_CPU),
        os.getpriority(os.PRIO_PROCESS, 0),
        os.sched_getaffinity(0),
    )


def test_its_own_limits_can_be_read_and_lowered():
    code = "import fcntl, os, resource\nresource.setrlimit(resource.RLIMIT_STACK, (1 << 20, 1 << 20))\n"
    code += "print(resource.getrlimit(resource.RLIMIT_STACK)[0], fcntl.fcntl(0, fcntl.F_GETFL) >= 0)"
    assert run_python(code).stdout == "1048576 True\n"


@pytest.mark.parametrize(("version", "closes"), [(0, False), (1, False), (2, False), (3, True), (6, True)])
def test_files_count_as_closed_only_where_they_cannot_be_emptied_either(tmp_path, version, closes):
    class Kernel:
        def syscall(self, number, *arguments):
            if number != 444:
                return 0
            return version if arguments[0] is None else os.open(os.devnull, os.O_RDONLY)

    assert sandbox_child._landlock(Kernel(), str(tmp_path), []) is closes


def test_a_server_on_this_machine_cannot_be_reached():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        heard = []
        server.settimeout(0.5)

        def listen() -> None:
            with suppress(OSError):
                heard.append(server.accept())

        thread = threading.Thread(target=listen)
        thread.start()
        result = run_python(f"import socket; socket.create_connection(('127.0.0.1', {port}))")
        thread.join()
    assert "PermissionError" in result.stderr
    assert heard == []


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"])
def test_no_kind_of_socket_can_be_opened(family):
    result = run_python(f"import socket; socket.socket(socket.{family})")
    assert "PermissionError" in result.stderr


def test_huge_output_is_cut_and_ends_the_program():
    result = run_python("while True: print('x' * 10000)", limits=SandboxLimits(seconds=60, max_output=50_000))
    assert result.ended == "output"
    assert len(result.stdout) < 200_000


def test_leaving_early_leaves_calls_unanswered():
    for leave in ("exit(0)", "import os; os._exit(0)", "raise SystemExit"):
        result = run_python(leave, calls=["1"])
        assert result.answers == []


def test_lines_that_are_no_answers_end_the_answers():
    # The caller's open files decide which descriptor the answers have: at least as many as here are taken.
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(40)]
    try:
        forge = "import os\nfor fd in range(3, 4096):\n  try: os.write(fd, b'[[[{\\n')\n  except OSError: pass"
        assert run_python(forge, calls=["1"]).answers == []
    finally:
        for handle in taken:
            os.close(handle)


def test_standard_input_is_empty_unless_given():
    assert "EOFError" in run_python("input()").stderr


def test_site_packages_and_python_variables_have_no_effect(monkeypatch, tmp_path):
    (tmp_path / "planted.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name in ("planted", "numpy", "torch"):
        assert "ModuleNotFoundError" in run_python(f"import {name}").stderr


def test_the_standard_library_works():
    code = "import asyncio, collections, decimal, fractions, heapq, itertools, json, math, random, re, statistics\n"
    assert (
        run_python(code + "print(asyncio.run(asyncio.sleep(0, 7)))", limits=SandboxLimits(seconds=60)).stdout == "7\n"
    )


def test_many_run_at_once_from_threads():
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda i: run_python(f"print({i})"), range(8)))
    assert [result.stdout for result in results] == [f"{i}\n" for i in range(8)]


def test_nothing_runs_where_the_system_cannot_confine_it(monkeypatch, tmp_path):
    weaker = tmp_path / "child.py"
    source = Path(sandbox_child.__file__).read_text()
    weaker.write_text(source.replace('closed.add("files")', "pass"))
    monkeypatch.setattr(sandbox_child, "__file__", str(weaker))
    with pytest.raises(SandboxUnavailableError, match="cannot keep sandboxed code from: files"):
        run_python("print('ran')")
    assert run_python("print('ran')", limits=SandboxLimits(allow_weaker=True)).stdout == "ran\n"


def test_a_process_that_cannot_start_is_an_error_and_not_the_codes_failure(monkeypatch, tmp_path):
    broken = tmp_path / "child.py"
    broken.write_text("raise SystemExit('no such thing')")
    monkeypatch.setattr(sandbox_child, "__file__", str(broken))
    with pytest.raises(SandboxStartError, match="ended with status 1 before the code ran: no such thing"):
        run_python("print(1)")


def test_limits_must_be_positive():
    with pytest.raises(ValueError, match="seconds must be above 0, got 0"):
        SandboxLimits(seconds=0)
    with pytest.raises(ValueError, match="memory must be at least"):
        SandboxLimits(memory=2**20)


def _num_processes() -> int:
    return sum(1 for name in os.listdir("/proc") if name.isdigit() and _is_sandbox(name))


def _is_sandbox(pid: str) -> bool:
    try:
        return b"sandbox_child" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
