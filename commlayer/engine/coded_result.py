"""Keeps a bucket's result encoded and decodes it where it is written, without a float32 copy in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from commlayer.compressors import payload
from commlayer.compressors.codec import NAN, OneRound
from commlayer.compressors.plan_codecs import result_codec
from commlayer.engine.layout import Layout


def codec_of_results(codec: Any) -> OneRound | None:
    """The codec whose results can be checked on arrival and decoded later; None if that is impossible."""
    inner = result_codec(codec)
    return inner if isinstance(inner, OneRound) and type(inner).decode is OneRound.decode else None


class CodedResult:
    """One result, kept until the bucket's next exchange."""

    def __init__(self, codec: OneRound, layout: Layout, body: memoryview, numel: int) -> None:
        """Checks the body in full; raises CorruptFrame as `decode` would. Decoding it later cannot fail."""
        self._codec, self._layout, self._numel = codec, layout, numel
        self.body = body
        head = payload.read(body, codec.id, numel)
        self._parts = None if head.flagged else codec.check(head, numel)

    @property
    def finite(self) -> bool:
        return self._parts is not None

    def write(self, factor: float | torch.Tensor, targets: Sequence[torch.Tensor | None]) -> None:
        """Sets targets = elements times factor, by slice. None skips a slice."""
        s, target = self._layout.slices[0], targets[0]
        if len(targets) == 1 and target is not None:
            to = target.detach()
            to = to if to.shape == self._layout.shapes[0] else to.view(-1)[s.start : s.stop]
            if to.is_contiguous() and to.dtype == torch.float32:
                self._decode(to.view(-1))
                to.mul_(factor)
                return
        if all(each is None for each in targets):
            return
        elements = self.whole().mul_(factor)
        pairs = self._layout.pairs(targets, self._layout.views(elements))
        torch._foreach_copy_([target.detach() for _, target in pairs], [view for view, _ in pairs])

    def whole(self) -> torch.Tensor:
        elements = torch.empty(self._numel)
        self._decode(elements)
        return elements

    def _decode(self, out: torch.Tensor) -> None:
        if self._parts is None:
            out.fill_(NAN)
        else:
            self._codec.apply(self._parts, out, assign=True)
