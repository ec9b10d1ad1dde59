"""Batches for reinforcement learning on language models: `DataProto` by verl's names, with its seams repaired."""

from kapell.protocol.config import DataProtoConfig
from kapell.protocol.dataproto import DataProto, DataProtoItem, collate_fn, list_of_dict_to_dict_of_list
from kapell.protocol.folding import fold_batch_dim, unfold_batch_dim
from kapell.protocol.meta import MetaPolicy, merge_meta, merge_metrics, register_meta_policy
from kapell.protocol.padding import pad_dataproto_to_divisor, unpad_dataproto
from kapell.protocol.read_only import ReadOnlyError, ReadOnlyTensor
from kapell.protocol.unions import union_numpy_dict, union_tensor_dict
from kapell.protocol.wire import pack, unpack

__all__ = [
    "DataProto",
    "DataProtoConfig",
    "DataProtoItem",
    "MetaPolicy",
    "ReadOnlyError",
    "ReadOnlyTensor",
    "collate_fn",
    "fold_batch_dim",
    "list_of_dict_to_dict_of_list",
    "merge_meta",
    "merge_metrics",
    "pack",
    "pad_dataproto_to_divisor",
    "register_meta_policy",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpack",
    "unpad_dataproto",
]
