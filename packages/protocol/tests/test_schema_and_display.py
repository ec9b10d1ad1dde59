"""Schemas, and how a batch shows itself."""

import pickle

import numpy as np
import pytest
import torch
from counting_store import CountingStore

from kapell.protocol import Column, DataProto, Ragged, Schema, SchemaError, StoredBatch
from kapell.protocol import tensordict_utils as tu

SCHEMA = Schema(
    {
        "responses": Column(torch.int64, ("batch", "response"), "token ids"),
        "response_mask": Column((torch.int64, torch.bool), ("batch", "response")),
        "uid": Column(object, ("batch",), "one per prompt"),
        "values": Column(torch.float32, ("batch", "response"), required=False),
    }
)


def fitting(**changes):
    columns = {
        "responses": torch.zeros(2, 5, dtype=torch.int64),
        "response_mask": torch.ones(2, 5, dtype=torch.bool),
        "uid": ["a", "b"],
    }
    return DataProto.from_single_dict(columns | changes)


def test_a_fitting_batch_gives_the_sizes_of_its_dimensions():
    assert SCHEMA.check(fitting()) == {"batch": 2, "response": 5}
    assert SCHEMA.check(fitting(extra=torch.zeros(2))) == {"batch": 2, "response": 5}
    assert SCHEMA.check(fitting().to_tensordict()) == {"batch": 2, "response": 5}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"responses": torch.zeros(2, 5)}, r"'responses': expected int64 \(batch, response\), got float32 \(2, 5\)"),
        (
            {"response_mask": torch.ones(2, 4).bool()},
            r"'response_mask'.*is 4 here and 5 in column 'responses'",
        ),
        ({"response_mask": torch.ones(2).bool()}, r"'response_mask'.*it has 1 dimensions, not 2"),
        ({"uid": np.zeros(2)}, r"'uid': expected object \(batch\), got float64 \(2\)"),
        ({"values": torch.zeros(2, 5).half()}, r"'values': expected float32"),
    ],
)
def test_an_error_names_the_column_what_was_expected_and_what_came(change, message):
    with pytest.raises(SchemaError, match=message):
        SCHEMA.check(fitting(**change))


def test_a_batch_by_reference_is_checked_by_what_is_known_of_it():
    store = CountingStore()
    stored = StoredBatch.put(fitting(), store)
    assert SCHEMA.check(stored[[1, 0, 1]]) == {"batch": 3, "response": 5}
    mixed = stored.union(DataProto.from_dict({"values": torch.zeros(2, 5)}))
    assert SCHEMA.check(mixed) == {"batch": 2, "response": 5}
    wrong = StoredBatch.put(fitting(responses=torch.zeros(2, 5), uid=np.zeros(2)), store)
    with pytest.raises(SchemaError, match=r"int64 \(batch, response\), got float32 \(2, 5\)") as caught:
        SCHEMA.check(wrong)
    assert "'uid': expected object (batch), got float64 (2)" in str(caught.value)
    assert store.fetched == []


def test_columns_by_reference_are_fetched_for_the_lengths_of_their_rows():
    schema = Schema({"ids": Column(torch.int64, ("batch", Ragged("tokens")))}, allow_extra=False)
    ids = tu.nested_tensor_from_tensor_list([torch.arange(2), torch.arange(3)])
    stored = StoredBatch.put(DataProto.from_dict({"ids": ids}), CountingStore())
    assert schema.check(stored) == {"batch": 2}
    with pytest.raises(SchemaError, match="'text': not expected"):
        schema.check(stored.union(DataProto.from_dict(non_tensors={"text": ["a", "b"]})))


def test_columns_by_reference_of_a_dtype_without_a_name_are_checked_too():
    cells = np.zeros(2, dtype=[("first", np.int64), ("second", np.float32)])
    schema = Schema({"cells": Column(cells.dtype, ("batch",))})
    assert schema.check(StoredBatch.put(DataProto.from_dict(non_tensors={"cells": cells}), CountingStore()))


def test_all_problems_are_told_at_once_and_survive_pickling():
    batch = fitting(responses=torch.zeros(2, 5)).select(non_tensor_batch_keys=[])
    with pytest.raises(SchemaError) as caught:
        SCHEMA.check(batch)
    assert len(caught.value.problems) == 2
    assert "'uid': expected object (batch), but it is missing" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_further_columns_can_be_forbidden():
    strict = Schema(SCHEMA.columns, allow_extra=False)
    assert strict.check(fitting())
    with pytest.raises(SchemaError, match="'extra': not expected"):
        strict.check(fitting(extra=torch.zeros(2)))


def test_fixed_and_ragged_dimensions():
    schema = Schema(
        {
            "ids": Column(torch.int64, ("batch", Ragged("tokens"))),
            "positions": Column(None, ("batch", 4, Ragged("tokens"))),
            "dense": Column(None, ("batch", "width"), required=False),
        }
    )
    ids = tu.nested_tensor_from_tensor_list([torch.arange(2), torch.arange(3)])
    positions = tu.nested_tensor_from_tensor_list([torch.zeros(4, 2), torch.zeros(4, 3)])
    assert schema.check(DataProto.from_dict({"ids": ids, "positions": positions})) == {"batch": 2}
    other = tu.nested_tensor_from_tensor_list([torch.zeros(4, 3), torch.zeros(4, 2)])
    with pytest.raises(SchemaError, match="lengths of tokens differ from those in column 'ids'"):
        schema.check(DataProto.from_dict({"ids": ids, "positions": other}))
    narrow = tu.nested_tensor_from_tensor_list([torch.zeros(3, 2), torch.zeros(3, 3)])
    with pytest.raises(SchemaError, match="dimension 1 is 3, not 4"):
        schema.check(DataProto.from_dict({"ids": ids, "positions": narrow}))
    with pytest.raises(SchemaError, match="dimension 1 is not ragged"):
        schema.check(DataProto.from_dict({"ids": torch.zeros(2, 3).long(), "positions": positions}))
    with pytest.raises(SchemaError, match="dimension 1 is ragged"):
        schema.check(DataProto.from_dict({"ids": ids, "positions": positions, "dense": ids}))


def test_a_schema_reads_as_a_table():
    assert "responses      int64 (batch, response)  token ids" in str(SCHEMA)


def test_the_repr_shows_columns_shapes_dtypes_and_bytes(make_mixed):
    shown = repr(make_mixed(4))
    assert shown.startswith("DataProto: 4 rows, ")
    for text in ("half", "bfloat16", "(4, 2)", "cpu", "16 B", "(4, 4, 0..4)", "object", "meta_info: step, settings"):
        assert text in shown


def test_describe_shows_a_few_rows_and_the_padding(make_mixed):
    batch = make_mixed(4)
    batch.padding(1)
    shown = batch.describe(rows=2)
    for text in ("5 rows (1 of them padding)", "'row 1'", "[1, 2]", "step = 7"):
        assert text in shown
    assert "'row 2'" not in shown
    assert "'row 0'" not in batch.get_data_info()


def test_html_escapes_what_is_in_the_batch():
    batch = DataProto.from_dict({"<b>": torch.ones(1)}, {"t": ["<script>"]}, {"<i>": "<u>"})
    shown = batch._repr_html_()
    assert "&lt;script&gt;" in shown
    for text in ("<script>", "<b>:", "<i>", "<u>"):
        assert text not in shown


def test_every_batch_can_be_shown(make_mixed):
    for batch in (DataProto(), make_mixed(0), make_mixed(1), DataProto(meta_info={"a": torch.ones(3)})):
        assert repr(batch)
        assert batch.describe()
        assert batch._repr_html_()
