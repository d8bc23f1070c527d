"""Reads results of sparse codecs as entries, without the dense tensor that `decode` makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from commlayer.compressors.allotted import Allotted
from commlayer.compressors.feedback import ErrorFeedback, Momentum
from commlayer.compressors.payload import Buffer
from commlayer.compressors.twoway import TwoWay

if TYPE_CHECKING:
    import torch

READ_AS_WRAPPED = (Allotted, ErrorFeedback, Momentum)


@runtime_checkable
class Reads(Protocol):
    """A codec whose results are entries."""

    def read(self, result: Buffer, numel: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The increasing positions (uint32 stored as int32) and values that `decode` would write; all other elements are 0.

        None if the result is flagged. CorruptPayload as from `decode`.
        """
        ...


def result_codec(codec: Any) -> Any:
    """The inner codec that reads the results of `codec`."""
    while isinstance(codec, (*READ_AS_WRAPPED, TwoWay)):
        codec = codec.down if isinstance(codec, TwoWay) else codec.inner
    return codec


def reader_of(codec: Any) -> Reads | None:
    """The codec that reads results as entries, or None if results are not entries."""
    inner = result_codec(codec)
    return inner if isinstance(inner, Reads) else None
