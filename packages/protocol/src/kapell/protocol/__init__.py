"""Batches for reinforcement learning on language models: `DataProto` by verl's names, with its seams repaired."""

from kapell.protocol.collation import collate_fn, list_of_dict_to_dict_of_list
from kapell.protocol.columns.spare import release_spare_memory
from kapell.protocol.config import DataProtoConfig
from kapell.protocol.dataproto import DataProto, DataProtoItem
from kapell.protocol.disk import BatchFileError, UnsafeValueError
from kapell.protocol.distributed import all_gather_data_proto
from kapell.protocol.folding import fold_batch_dim, unfold_batch_dim
from kapell.protocol.future import DataProtoFuture
from kapell.protocol.meta import MetaPolicy, merge_meta, merge_metrics, register_meta_policy
from kapell.protocol.padding import pad_dataproto_to_divisor, unpad_dataproto
from kapell.protocol.read_only import ReadOnlyError, ReadOnlyTensor
from kapell.protocol.schema import Column, Ragged, Schema, SchemaError
from kapell.protocol.store import MemoryStore, Store
from kapell.protocol.stored import StoredBatch
from kapell.protocol.stored_columns import ColumnFacts
from kapell.protocol.tensor_bytes import (
    deserialize_single_tensor,
    deserialize_tensordict,
    serialize_single_tensor,
    serialize_tensordict,
)
from kapell.protocol.unions import union_numpy_dict, union_tensor_dict
from kapell.protocol.wire import pack, unpack

__all__ = [
    "BatchFileError",
    "Column",
    "ColumnFacts",
    "DataProto",
    "DataProtoConfig",
    "DataProtoFuture",
    "DataProtoItem",
    "MemoryStore",
    "MetaPolicy",
    "Ragged",
    "ReadOnlyError",
    "ReadOnlyTensor",
    "Schema",
    "SchemaError",
    "Store",
    "StoredBatch",
    "UnsafeValueError",
    "all_gather_data_proto",
    "collate_fn",
    "deserialize_single_tensor",
    "deserialize_tensordict",
    "fold_batch_dim",
    "list_of_dict_to_dict_of_list",
    "merge_meta",
    "merge_metrics",
    "pack",
    "pad_dataproto_to_divisor",
    "register_meta_policy",
    "release_spare_memory",
    "serialize_single_tensor",
    "serialize_tensordict",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpack",
    "unpad_dataproto",
]
