"""Batches as plain TensorDicts: tensors, jagged tensors, one Python value a row, and values for all rows.

The same row operations as `DataProto`'s. Values for all rows (`NonTensorData`) take the place of ``meta_info``.
Functions give new TensorDicts, but for these, which change theirs as in verl: ``assign_*``, ``pop*``,
``union_tensor_dict``.
"""

from kapell.protocol.tensordict_utils.building import (
    assign_non_tensor,
    assign_non_tensor_data,
    assign_non_tensor_stack,
    get_tensordict,
    list_of_dict_to_tensordict,
    nested_tensor_from_tensor_list,
)
from kapell.protocol.tensordict_utils.entries import (
    assert_tensordict_eq,
    contiguous,
    get,
    get_keys,
    get_non_tensor_data,
    maybe_fix_3d_position_ids,
    pop,
    pop_keys,
    union_tensor_dict,
    unwrap_non_tensor_data,
)
from kapell.protocol.tensordict_utils.rows import (
    chunk_tensordict,
    concat_nested_tensors,
    concat_tensordict,
    concat_tensordict_with_none_bsz,
    index_select_tensor_dict,
    make_iterator,
    pad_to_divisor,
    unpad,
)

__all__ = [
    "assert_tensordict_eq",
    "assign_non_tensor",
    "assign_non_tensor_data",
    "assign_non_tensor_stack",
    "chunk_tensordict",
    "concat_nested_tensors",
    "concat_tensordict",
    "concat_tensordict_with_none_bsz",
    "contiguous",
    "get",
    "get_keys",
    "get_non_tensor_data",
    "get_tensordict",
    "index_select_tensor_dict",
    "list_of_dict_to_tensordict",
    "make_iterator",
    "maybe_fix_3d_position_ids",
    "nested_tensor_from_tensor_list",
    "pad_to_divisor",
    "pop",
    "pop_keys",
    "union_tensor_dict",
    "unpad",
    "unwrap_non_tensor_data",
]
