"""Showing a batch to a person: one line, a table with a few rows, and the same for notebooks."""

from __future__ import annotations

import html
import textwrap
from typing import Any

import numpy as np
import torch

from kapell.protocol.columns import cell, cut, is_jagged, num_bytes, parts_of
from kapell.protocol.container import BatchContainer

__all__ = ["describe", "readable_bytes", "summary", "to_html"]

_CELL_WIDTH = 28  # characters of a value
_VALUES_SHOWN = 6  # numbers of a row


def summary(batch: BatchContainer) -> str:
    """Give rows, columns and bytes, without looking at values."""
    lines = [_title(batch), *_aligned([entry[:-1] for entry in _columns(batch, 0)])]
    if batch.meta_info:
        lines.append(f"  meta_info: {', '.join(map(str, batch.meta_info))}")
    return "\n".join(lines)


def describe(batch: BatchContainer, rows: int = 3) -> str:
    """Give a table of the columns (dtype, shape, device, bytes) with the values of the first rows."""
    header = ["column", "dtype", "shape", "where", "bytes", "first rows" if rows else ""]
    table = [header, *[[*entry[:-1], "  ".join(entry[-1])] for entry in _columns(batch, rows)]]
    meta = [f"  {key} = {_short(value)}" for key, value in batch.meta_info.items()]
    return "\n".join([_title(batch), *_aligned(table), *(["meta_info", *meta] if meta else [])])


def to_html(batch: BatchContainer, rows: int = 3) -> str:
    """Give the table as HTML; values are escaped."""

    def line(tag: str, texts: list[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts) + "</tr>"

    shown = min(rows, len(batch))
    head = line("th", ["column", "dtype", "shape", "where", "bytes", *[f"row {row}" for row in range(shown)]])
    body = "".join(line("td", [*entry[:-1], *entry[-1]]) for entry in _columns(batch, rows))
    meta = "".join(line("td", [str(key), _short(value)]) for key, value in batch.meta_info.items())
    meta_table = f"<table><caption>meta_info</caption>{meta}</table>" if meta else ""
    return f"<div><b>{html.escape(_title(batch))}</b><table>{head}{body}</table>{meta_table}</div>"


def readable_bytes(count: int) -> str:
    """Give a size with a unit.

    >>> readable_bytes(1536)
    '1.5 KiB'
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def _title(batch: BatchContainer) -> str:
    padded = int(batch.padding_mask.sum())
    padding = f" ({padded} of them padding)" if padded else ""
    return f"{type(batch).__name__}: {len(batch)} rows{padding}, {readable_bytes(batch.nbytes)}"


def _columns(batch: BatchContainer, rows: int) -> list[list[Any]]:
    """Give name, dtype, shape, place and bytes of each column, and the texts of its first rows."""
    entries = []
    for name, column in batch._items():
        head = cut(column, 0, min(rows, len(batch)))
        values = [_short(cell(head, row)) for row in range(min(rows, len(batch)))]
        dtype = str(getattr(column, "dtype", None) or type(column).__name__).removeprefix("torch.")
        where = str(column.device) if isinstance(column, torch.Tensor) else "numpy"
        entries.append([name, dtype, _shape(column), where, readable_bytes(num_bytes(column)), values])
    return entries


def _shape(column: Any) -> str:
    sizes = [str(size) for size in column.shape] if not getattr(column, "is_nested", False) else ["nested"]
    if isinstance(column, torch.Tensor) and is_jagged(column):
        values, offsets, ragged = parts_of(column)
        lengths = offsets.diff()
        span = f"{int(lengths.min())}..{int(lengths.max())}" if lengths.numel() else "0"
        inner = [span if dim == ragged - 1 else str(size) for dim, size in enumerate(values.shape)]
        sizes = [str(column.shape[0]), *inner]
    return f"({', '.join(sizes)})"


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        flat = value.detach().reshape(-1)[:_VALUES_SHOWN].cpu()
        numbers = ", ".join(f"{number:.4g}" if isinstance(number, float) else str(number) for number in flat.tolist())
        text = numbers + (", ..." if value.numel() > _VALUES_SHOWN else "")
        return text if value.dim() == 0 else f"[{text}]"
    if isinstance(value, np.generic):
        value = value.item()
    return textwrap.shorten(repr(value), _CELL_WIDTH, placeholder="...")


def _aligned(table: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)] if table else []
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
