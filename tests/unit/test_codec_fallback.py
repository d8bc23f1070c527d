"""The fallback in numpy gives the bytes, results and residuals of the oracle, and refuses other codecs."""

from __future__ import annotations

import pytest
import torch
from oracle import codec_kernels
from support import codecs as kit

from commlayer.codec_spec import parse_spec
from commlayer.compressors import Codec, codec_of, fallback, kernels, onebit, parse, snapshot, wrap
from commlayer.errors import CorruptFrame, InvalidInput
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


@pytest.mark.parametrize("codec", SUPPORTED, ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_same_bytes_as_the_oracle(codec: Codec, n: int) -> None:
    assert run(codec, n, fallback) == run(codec, n, codec_kernels)


@pytest.mark.parametrize("kind", ["ef", "bitmap", "blocks"])
def test_damaged_positions_are_refused_as_by_the_oracle(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    idx = torch.tensor([3, 4, 5, 6, 40, 41, 90, 300, 301, 302], dtype=torch.int32)
    good = bytearray(200)
    nbytes = getattr(codec_kernels, f"{kind}_encode")(memoryview(good), idx, 400)
    for _ in range(300):
        bad = bytearray(good[:nbytes])
        at = int(torch.randint(len(bad), (1,), generator=generator))
        bad[at] ^= 1 << int(torch.randint(8, (1,), generator=generator))
        outcomes = []
        for backend in (fallback, codec_kernels):
            out = torch.zeros(10, dtype=torch.int32)
            try:
                getattr(backend, f"{kind}_decode")(out, 400, bytes(bad))
            except CorruptFrame:
                out.fill_(-1)
            outcomes.append(out)
        assert torch.equal(*outcomes)



def test_other_codecs_are_refused_in_one_line() -> None:
    with kernels.use(fallback):
        with pytest.raises(InvalidInput, match="randomk.* needs the native core") as caught:
            codec_of(Bucket(0, (Slice(0, 0, 10),), "service", "randomk()"))
        assert caught.value.code == "E-CODEC-BACKEND"
        state = onebit().init(Spec((64,)))
        with pytest.raises(InvalidInput) as caught:
            onebit().start(torch.ones(64), state, kit.room(onebit(), Spec((64,))))
        assert caught.value.code == "E-CODEC-BACKEND"
