import numpy as np

from kapell.workergroup.describe import column_shapes


class Batch:
    """A batch as DataProto has it: tensors by name, and object columns by name."""

    def __init__(self, batch, non_tensor_batch):
        self.batch = batch
        self.non_tensor_batch = non_tensor_batch


def test_columns_of_a_batch_are_shown_with_shape_and_dtype():
    batch = Batch({"ids": np.zeros((3, 7), dtype=np.int64)}, {"uid": np.array(["a", "b", "c"], dtype=object)})
    assert column_shapes({"batch": batch}) == {"ids": "(3, 7) int64", "uid": "(3,) object"}


def test_a_batch_without_tensors_is_shown_too():
    assert column_shapes({"batch": Batch(None, {"uid": np.zeros(2)})}) == {"uid": "(2,) float64"}


def test_arrays_and_lists_are_shown_by_the_name_of_their_argument():
    shown = column_shapes({"rows": [1, 2], "mask": np.ones(2, dtype=bool), "scale": 2.0, "config": {"path": "x"}})
    assert shown == {"rows": "2 rows of list", "mask": "(2,) bool"}


def test_many_columns_are_cut_short():
    shown = column_shapes({"table": {f"column{i}": np.zeros(1) for i in range(100)}})
    assert len(shown) == 17
    assert shown["..."] == "more columns"
