"""Memory of large results is used again, but never while anything looks at it."""

import gc
import mmap
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kapell.protocol import DataProto, release_spare_memory
from kapell.protocol.columns.spare import SPARE, SpareMemory

MB = 1 << 20
needs_huge_pages = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no huge pages on this system")


def address(array: np.ndarray) -> int:
    return array.ctypes.data


@needs_huge_pages
def test_memory_that_nobody_looks_at_is_used_again():
    memory = SpareMemory(limit=16 * MB)
    array = memory.array(5 * MB)
    first = address(array)
    del array
    assert memory.nbytes == 5 * MB
    assert address(memory.array(4 * MB + 1)) == first


@pytest.mark.parametrize(
    "look",
    [
        lambda array: array[10:20],
        lambda array: array[10:][5:].reshape(-1, 1)[:, 0],
        lambda array: torch.from_numpy(array),
        lambda array: torch.from_numpy(array)[10:20].view(torch.int8),
        lambda array: torch.from_numpy(array).untyped_storage(),
        lambda array: torch.from_numpy(array)[3:].numpy()[2:],
        lambda array: memoryview(array)[10:],
        lambda array: np.asarray(memoryview(array)),
    ],
)
def test_no_view_of_a_view_loses_its_memory(look):
    memory = SpareMemory(limit=64 * MB)
    array = memory.array(4 * MB)
    taken = address(array)
    view = look(array)
    del array
    gc.collect()
    assert memory.nbytes == 0
    assert address(memory.array(4 * MB)) != taken
    del view


@given(st.lists(st.tuples(st.integers(4, 9), st.integers(0, 4)), max_size=12))
@settings(deadline=None, max_examples=30)
def test_what_is_held_never_changes(steps):
    memory = SpareMemory(limit=24 * MB)
    held: list[tuple[int, np.ndarray]] = []
    for value, (megabytes, dropped) in enumerate(steps):
        array = memory.array(megabytes * MB)
        assert len(array) == megabytes * MB
        array[:] = value
        held.append((value, array[:: MB // 2]))
        del array, held[: min(dropped, len(held) - 1)]
        assert memory.nbytes <= 24 * MB
        for other, view in held:
            assert (view == other).all()


@needs_huge_pages
def test_no_more_than_the_limit_waits_and_the_oldest_goes_first():
    memory = SpareMemory(limit=8 * MB)
    arrays = [memory.array(4 * MB) for _ in range(3)]
    addresses = list(map(address, arrays))
    for position in range(3):
        arrays[position] = None
    assert memory.nbytes == 8 * MB
    again = [memory.array(4 * MB) for _ in range(2)]
    assert list(map(address, again)) == addresses[1:]
    memory.release()
    assert memory.nbytes == 0


@needs_huge_pages
def test_a_block_much_larger_than_asked_is_left_for_others():
    memory = SpareMemory(limit=64 * MB)
    large, small = memory.array(32 * MB), memory.array(6 * MB)
    at_large, at_small = address(large), address(small)
    del large, small
    assert address(memory.array(5 * MB)) == at_small
    assert address(memory.array(30 * MB)) == at_large


def test_without_room_for_a_block_numpy_decides(monkeypatch):
    def no_room(*_):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", no_room)
    array = SpareMemory(limit=MB).array(4 * MB)
    array[:] = 1
    assert array.flags.owndata


def test_many_threads_never_share_a_block():
    memory = SpareMemory(limit=64 * MB)
    wrong: list[int] = []

    def work(value: int) -> None:
        for _ in range(40):
            array = memory.array(4 * MB)[::4096]
            array[:] = value
            if not (array == value).all():
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@needs_huge_pages
def test_joins_use_the_memory_of_results_that_are_gone():
    batch = DataProto.from_dict({"x": torch.zeros(3000, 1024)})
    release_spare_memory()
    joined = DataProto.concat([batch, batch])
    first = joined.batch["x"].data_ptr()
    column = joined.batch["x"]
    del joined
    assert SPARE.nbytes == 0
    column.fill_(7)
    assert not DataProto.concat([batch, batch]).batch["x"].any()
    del column
    assert first in {DataProto.concat([batch, batch]).batch["x"].data_ptr() for _ in range(2)}
    release_spare_memory()
    assert SPARE.nbytes == 0
