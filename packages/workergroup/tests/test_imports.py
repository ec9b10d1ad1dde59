import subprocess
import sys

HEAVY = ("torch", "numpy", "ray", "tensordict", "transformers", "pytest", "opentelemetry")


def test_import_brings_no_heavy_library():
    code = f"import sys, kapell.workergroup; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_a_local_call_brings_no_heavy_library():
    code = f"""
import sys
from kapell.workergroup import ClassWithInitArgs, LocalBackend, Worker
with LocalBackend() as backend:
    group = backend.worker_group(backend.resource_pool([2]), ClassWithInitArgs(Worker))
    group.execute_all_sync("get_master_addr_port")
    print([name for name in {HEAVY!r} if name in sys.modules])
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_every_public_name_exists():
    import kapell.workergroup as package

    assert [name for name in package.__all__ if not hasattr(package, name)] == []
