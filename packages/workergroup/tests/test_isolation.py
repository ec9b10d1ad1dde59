import threading
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kapell.workergroup import isolate

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=12,
)


@dataclass
class Batch:
    rows: list
    array: np.ndarray
    notes: dict = field(default_factory=dict)


@given(plain)
def test_copy_equals_the_value(value):
    assert isolate(value) == value


@given(st.lists(st.lists(st.integers())))
def test_nested_lists_are_copied(value):
    before = [list(inner) for inner in value]
    copy = isolate(value)
    for inner in copy:
        inner.append(-1)
    copy.append([])
    assert value == before


def test_arrays_are_copied_and_writable():
    array = np.arange(4)
    array.flags.writeable = False
    copy = isolate(array)
    copy[0] = 9
    assert array[0] == 0


def test_object_arrays_are_copied_to_their_cells():
    cells = np.empty(2, dtype=object)
    cells[:] = [[1], [2]]
    isolate(cells)[0].append(9)
    assert cells[0] == [1]


def test_arrays_inside_objects_are_copied_once_and_stay_shared():
    array = np.arange(3)
    batch = Batch([array, array], array)
    copy = isolate(batch)
    assert copy.array is copy.rows[0] is copy.rows[1]
    assert copy.array is not array
    copy.array[0] = 9
    assert array[0] == 0


def test_what_pickle_refuses_is_copied_too():
    values = {"function": lambda: 1, "rows": [1]}
    copy = isolate(values)
    copy["rows"].append(2)
    assert values["rows"] == [1]
    assert copy["function"]() == 1


def test_what_cannot_be_copied_is_refused_not_shared():
    lock = threading.Lock()
    try:
        copy = isolate([lock])
    except TypeError:
        return
    assert copy[0] is not lock


class Itself:
    """Says how it is copied."""

    def __init__(self, rows):
        self.rows = rows

    def __kapell_private__(self, private):
        return Itself(private(self.rows))

    def __reduce__(self):
        raise AssertionError("it is not pickled")


def test_a_type_that_says_how_it_is_copied_is_asked():
    rows = [[1], [2]]
    value = Itself(rows)
    for copy in (isolate(value), isolate({"a": [value]})["a"][0]):
        copy.rows[0].append(9)
        assert rows == [[1], [2]]
    twice = isolate([value, value])
    assert twice[0] is twice[1]


def test_cells_of_object_arrays_that_are_sequences_stay_one_a_row():
    cells = np.empty((2, 1), dtype=object)
    cells[0, 0], cells[1, 0] = [1, 2], [3, 4]
    copy = isolate(cells)
    assert copy.shape == (2, 1)
    assert copy.tolist() == [[[1, 2]], [[3, 4]]]
    copy[0, 0].append(9)
    assert cells[0, 0] == [1, 2]
