"""Settings of the whole program for batches."""

from __future__ import annotations

__all__ = ["DataProtoConfig"]


class _Settings(type):
    """Makes ``DataProtoConfig.auto_padding = "yes"`` an error where it is written."""

    auto_padding_key = "_kapell_auto_padding"
    _auto_padding = False

    @property
    def auto_padding(cls) -> bool:
        return cls._auto_padding

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        if not isinstance(enabled, bool):
            raise TypeError(f"auto_padding is True or False, got {enabled!r}")
        cls._auto_padding = enabled


class DataProtoConfig(metaclass=_Settings):
    """Whether dispatch pads batches that don't divide evenly.

    ``DataProtoConfig.auto_padding = True`` asks for it everywhere; ``DataProto.from_dict(..., auto_padding=True)``
    asks for one batch, by the ``meta_info`` entry named ``DataProtoConfig.auto_padding_key``.
    """
