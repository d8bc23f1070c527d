"""What the quantisers promise beyond the laws: error bounds, unbiased rounding, streams of random numbers, refused bytes."""

from __future__ import annotations

import math

import pytest
import torch
from support import codecs as kit

from commlayer.compressors import Codec, int4, int8, onebit, qsgd, seed
from commlayer.compressors.state import SERVER
from commlayer.errors import CorruptFrame
from commlayer.records import Spec

N = 4480
DRAWN: list[Codec] = [
    qsgd(levels=1),
    qsgd(),
    qsgd(block=64, levels=15, norm="l2"),
    qsgd(levels=127),
]
STEP_OF_MAX = {  # codec -> (block, largest error in largest magnitudes of the block); the scale is up to 2^-7 above
    int8(block=64): (64, 0.5 / 127),
    int4(block=64): (64, 0.5 / 7 * (1 + 2**-7)),
    qsgd(block=64, levels=1): (64, 1 + 2**-7),
    qsgd(block=64): (64, (1 + 2**-7) / 7),
    qsgd(block=64, levels=127): (64, (1 + 2**-7) / 127),
    onebit(block=64): (64, 1 + 2**-7),
}


@pytest.mark.parametrize("codec", STEP_OF_MAX, ids=str)
def test_no_element_is_further_off_than_a_step(codec: Codec) -> None:
    block, bound = STEP_OF_MAX[codec]
    x = kit.noise(N) ** 3
    error = (kit.decoded(codec, kit.encode(codec, x, codec.init(Spec((N,)))), N) - x).abs()
    for part, most in zip(error.split(block), x.abs().split(block), strict=True):
        assert float(part.max()) <= bound * float(most.max()) * 1.0001


@pytest.mark.parametrize("codec", [onebit(block=64), int4(block=64), int8(block=64)], ids=str)
def test_what_wants_feedback_is_a_contraction(codec: Codec) -> None:
    """The condition under which error feedback converges: |v - sent| < |v|, here for every block."""
    for x in (kit.noise(N), kit.noise(N) ** 3, kit.noise(N).abs() + 1.0):
        rest = x - kit.decoded(codec, kit.encode(codec, x, codec.init(Spec((N,)))), N)
        assert bool((rest.view(-1, 64).norm(dim=1) < x.view(-1, 64).norm(dim=1)).all())


@pytest.mark.parametrize("codec", DRAWN, ids=str)
@pytest.mark.parametrize("cubed", [False, True])
def test_the_mean_of_what_is_received_is_what_was_sent(codec: Codec, cubed: bool) -> None:
    """Over 200 steps, by Hoeffding: a mean of m draws in a range w is off by t with P < 2 exp(-2 m t^2 / w^2).

    Each element with t = w / 4: 2.8e-11, or 1.3e-7 for all of them. All together, once as they are and once by the sign of x,
    so that a pull towards zero shows: 5e-14.
    """
    x = kit.noise(N, 3) ** 3 if cubed else kit.noise(N, 3)
    state, steps = codec.init(Spec((N,))), 200
    total, least, most = torch.zeros(N, dtype=torch.float64), torch.full((N,), math.inf), torch.full((N,), -math.inf)
    for _ in range(steps):
        out = kit.decoded(codec, kit.encode(codec, x, state), N)
        total += out
        least, most = torch.minimum(least, out), torch.maximum(most, out)
    error, width = total / steps - x, (most - least).double()
    drawn = width > 0
    assert float(drawn.double().mean()) > 0.3
    assert bool((error.abs()[drawn] <= 0.25 * width[drawn]).all())
    for sign in (torch.ones(N), x.sign()):
        assert abs(float((error * sign).mean())) < float(width.max()) * 5.6 / math.sqrt(2 * steps * N)


def test_senders_steps_and_the_server_draw_other_numbers() -> None:
    x, seen = kit.noise(N), set()
    for sender in (0, 1, SERVER):
        for bucket in (0, 1):
            state = qsgd().init(Spec((N,)))
            seed(state, "job", bucket, sender)
            seen |= {bytes(kit.encode(qsgd(), x, state)) for _ in range(3)}
    assert len(seen) == 18


BROKEN = [  # codec, numel, (byte of the body, value), words
    (int4(block=8), 16, {1: 0x7E}, "scale"),
    (int4(block=8), 16, {1: 0x80}, "scale"),
    (int4(block=8), 15, {11: 0x10}, "after its last element"),
    (qsgd(block=8, levels=1), 16, {0: 0x00, 1: 0x7F}, "scale"),
    (qsgd(block=8, levels=3), 10, {7: 0x40}, "after its last element"),
    (onebit(block=8), 16, {0: 0x80, 1: 0x7F}, "scale"),
    (onebit(block=8), 9, {5: 0x02}, "after its last element"),
]


@pytest.mark.parametrize(("codec", "n", "bad", "words"), BROKEN, ids=lambda v: v if isinstance(v, str) else str(v))
def test_bytes_that_break_a_format_are_named(codec: Codec, n: int, bad: dict[int, int], words: str) -> None:
    payload = bytearray(kit.encode(codec, torch.zeros(n), codec.init(Spec((n,)))))
    assert not kit.decoded(codec, bytes(payload), n).any()
    for at, value in bad.items():
        payload[16 + at] = value
    out = torch.full((n,), 7.0)
    with pytest.raises(CorruptFrame, match=f"{codec.name} .*{words}.*E-PAYLOAD"):
        codec.decode(bytes(payload), codec.init(Spec((n,))), out)
    assert bool((out == 7.0).all())


LARGEST = [  # the largest scale that each takes, and every byte of codes set
    (int4(block=8), (0x7DFF).to_bytes(2, "little"), 4),
    (qsgd(block=8, levels=1), (0x7EFF).to_bytes(2, "little"), 2),
    (qsgd(block=8, levels=127), (0x7BFF).to_bytes(2, "little"), 8),
    (onebit(block=8), (0x7F7F).to_bytes(2, "little"), 1),
]


@pytest.mark.parametrize(("codec", "scale", "nbytes"), LARGEST, ids=str)
def test_no_legal_byte_decodes_to_infinity(codec: Codec, scale: bytes, nbytes: int) -> None:
    good = bytes(kit.encode(codec, torch.zeros(8), codec.init(Spec((8,)))))
    for byte in range(256):
        assert bool(torch.isfinite(kit.decoded(codec, good[:16] + scale + bytes([byte]) * nbytes, 8)).all())
    above = (int.from_bytes(scale, "little") + 1).to_bytes(len(scale), "little")
    with pytest.raises(CorruptFrame):
        kit.decoded(codec, good[:16] + above + bytes(nbytes), 8)
