"""The fallback in numpy gives the bytes, results and residuals of the native core, and refuses other codecs."""

from __future__ import annotations

import pytest
import torch
from support import codecs as kit

from commlayer.compressors import codec_of, fallback, kernels, onebit
from commlayer.errors import InvalidInput
from commlayer.records import Bucket, Slice, Spec


def test_other_codecs_are_refused_in_one_line() -> None:
    with kernels.use(fallback):
        with pytest.raises(InvalidInput, match="randomk.* needs the native core") as caught:
            codec_of(Bucket(0, (Slice(0, 0, 10),), "service", "randomk()"))
        assert caught.value.code == "E-CODEC-BACKEND"
        state = onebit().init(Spec((64,)))
        with pytest.raises(InvalidInput) as caught:
            onebit().start(torch.ones(64), state, kit.room(onebit(), Spec((64,))))
        assert caught.value.code == "E-CODEC-BACKEND"
