"""Results of sparse codecs as their entries, without the dense tensor that `decode` makes. Knows which wrappers read as what
they wrap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from commlayer.compressors.allotted import Allotted
from commlayer.compressors.codec import Buffer
from commlayer.compressors.feedback import ErrorFeedback
from commlayer.compressors.momentum import Momentum
from commlayer.compressors.twoway import TwoWay

if TYPE_CHECKING:
    import torch

READ_AS_WRAPPED = (Allotted, ErrorFeedback, Momentum)


@runtime_checkable
class Reads(Protocol):
    """A codec whose results are entries."""

    def read(self, result: Buffer, numel: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Positions (int32 that stands for uint32), which increase, and their values: what `decode` writes, all else being 0.

        None of a flagged result. CorruptPayload as from `decode`.
        """
        ...


def result_codec(codec: Any) -> Any:
    """The codec inside wrappers whose results `codec` reads."""
    while isinstance(codec, (*READ_AS_WRAPPED, TwoWay)):
        codec = codec.down if isinstance(codec, TwoWay) else codec.inner
    return codec


def reader_of(codec: Any) -> Reads | None:
    """Who reads the results of this codec as entries; None where nobody can."""
    inner = result_codec(codec)
    return inner if isinstance(inner, Reads) else None
