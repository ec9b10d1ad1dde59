import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource
from kapell.workergroup import keep_freed_memory

def pages_of_five_calls():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        blocks = [bytes([1]) * 16_000_000 for _ in range(4)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

pages_of_five_calls()
fresh = pages_of_five_calls()
changed = keep_freed_memory()
pages_of_five_calls()
print(changed, fresh, pages_of_five_calls())
"""
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_")


def pages_of(**environment):
    """Whether memory is kept, and the pages that five calls fetched before and after."""
    own = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**own, **environment}, capture_output=True, text=True, check=True
    )
    changed, fresh, kept = done.stdout.split()
    return changed == "True", int(fresh), int(kept)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the setting is glibc's")
def test_a_process_does_not_fetch_the_memory_of_each_call_anew():
    changed, fresh, kept = pages_of()
    assert changed
    # 320 MB in all. How large a page is, the machine decides; of those of 2 MB there are still 160.
    assert kept * 4 < fresh, (fresh, kept)


@pytest.mark.parametrize("name", VARIABLES)
def test_what_the_environment_says_of_it_stays(name):
    changed, _, _ = pages_of(**{name: "131072"})
    assert not changed
