import subprocess
import sys

PROGRAM = """
import resource
import torch
from kapell.trainer.devices import set_up_process

def pages_of_five_passes():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        activations = [torch.ones(4_000_000) for _ in range(4)]
        del activations
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

pages_of_five_passes()
fresh = pages_of_five_passes()
set_up_process("cpu", local_rank=0, torch_threads=1)
pages_of_five_passes()
kept = pages_of_five_passes()
print(fresh, kept)
"""


def test_a_workers_process_does_not_fetch_the_memory_of_each_pass_anew():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    fresh, kept = map(int, done.stdout.split())
    # 320 MB in all. How large a page is, the machine decides; with those of 2 MB there are still 160 to fetch.
    assert kept * 4 < fresh, done.stdout
