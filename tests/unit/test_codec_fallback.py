"""The fallback in numpy gives the bytes, results and residuals of the native core, and refuses other codecs."""

from __future__ import annotations

import pytest
import torch
from support import codecs as kit

from commlayer.codec_spec import parse_spec
from commlayer.compressors import Codec, codec_of, fallback, kernels, onebit, parse, snapshot, wrap
from commlayer.errors import InvalidInput
from commlayer.records import Bucket, Slice, Spec

SUPPORTED = [codec for codec in [*kit.PLAIN, *map(parse, kit.NAMED.values())]
             if all(part.family in fallback.FAMILIES and part.get("values") != "int4"
                    for part in parse_spec(str(codec)).layers())]
SIZES = (0, 1, 2, 31, 257, 4097, 20_011)


def run(codec: Codec, n: int, kernels_: object) -> list[bytes]:
    """All bytes of three steps of two workers: payloads, results, sums and residuals."""
    found = []
    with kernels.use(kernels_):  # type: ignore[arg-type]
        cluster = kit.Cluster(wrap(codec), Spec((n,)), 2)
        for step in range(4):
            xs = [kit.noise(n, 10 * step + rank) for rank in range(2)]
            if step == 2 and n > 9:
                xs[0][9] = float("inf")
                xs[1][8] = 3e38
            sums = cluster.step(xs)
            found += [bytes(p) for p in cluster.payloads] + [bytes(cluster.result)]
            found += [s.numpy().tobytes() if cluster.finite[0] else b"" for s in sums]
            found += [value.tobytes() for state in cluster.states for value in snapshot(state).values()]
    return found


@pytest.mark.skipif("native" not in kernels.BACKENDS, reason="built without the native core")
@pytest.mark.parametrize("codec", SUPPORTED, ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_same_bytes_as_the_native_core(codec: Codec, n: int) -> None:
    assert run(codec, n, fallback) == run(codec, n, kernels.BACKENDS["native"])


def test_other_codecs_are_refused_in_one_line() -> None:
    with kernels.use(fallback):
        with pytest.raises(InvalidInput, match="randomk.* needs the native core") as caught:
            codec_of(Bucket(0, (Slice(0, 0, 10),), "service", "randomk()"))
        assert caught.value.code == "E-CODEC-BACKEND"
        state = onebit().init(Spec((64,)))
        with pytest.raises(InvalidInput) as caught:
            onebit().start(torch.ones(64), state, kit.room(onebit(), Spec((64,))))
        assert caught.value.code == "E-CODEC-BACKEND"
