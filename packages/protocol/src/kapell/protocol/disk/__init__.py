"""Batches on disk: one safetensors file with a JSON manifest. Reading it runs no code."""

from kapell.protocol.disk.cells import decode_value, encode_value
from kapell.protocol.disk.errors import BatchFileError, UnsafeValueError
from kapell.protocol.disk.reading import read_batch
from kapell.protocol.disk.writing import write_batch

__all__ = ["BatchFileError", "UnsafeValueError", "decode_value", "encode_value", "read_batch", "write_batch"]
