"""Columns: each row operation once, for tensors, jagged tensors, numpy arrays and the entries of a TensorDict."""

from kapell.protocol.columns.entries import ENTRIES
from kapell.protocol.columns.equality import close, same
from kapell.protocol.columns.jagged import column_of_rows, from_rows, is_jagged, make_jagged, parts_of, ragged_dim
from kapell.protocol.columns.memory import as_in_memory, raw_bytes
from kapell.protocol.columns.numbers import NUMBERS, bytes_of_array
from kapell.protocol.columns.objects import column_of_objects, flat_objects
from kapell.protocol.columns.registry import (
    ColumnKind,
    cell,
    cut,
    join,
    kind_of,
    num_bytes,
    num_rows,
    split,
    take,
    use_kinds,
)
from kapell.protocol.columns.value_stack import ValueStack, array_of

__all__ = [
    "ColumnKind",
    "ValueStack",
    "array_of",
    "as_in_memory",
    "bytes_of_array",
    "cell",
    "close",
    "column_of_objects",
    "column_of_rows",
    "cut",
    "flat_objects",
    "from_rows",
    "is_jagged",
    "join",
    "kind_of",
    "make_jagged",
    "num_bytes",
    "num_rows",
    "parts_of",
    "ragged_dim",
    "raw_bytes",
    "same",
    "split",
    "take",
]

use_kinds((*NUMBERS, *ENTRIES))
