"""Quantisers and draws on the device against native core and reference, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
from support.cuda import raw, same, zeros
from support.native_builds import KINDS, numbers

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SIZES = (0, 1, 8, 33, 257, 4097)
KEY, STEP = 0x7123456789ABCDEF, 2**32 + 7

Make = Callable[[np.ndarray], torch.Tensor]


def check(
    name: str, block: int, n: int, kind: str, width: float, scale_nbytes: int, args: tuple[object, ...],
    shape: tuple[object, ...],
) -> None:
    """Codes x and x + residual, and decodes both ways; `width` is in bits."""
    x, old, nbytes, count = numbers(n, n, kind=kind), numbers(n, n + 1), -(-round(n * width * 5) // 40), -(-n // block)

    def code(module: ModuleType, there: Make) -> list[bytes]:
        out = []
        for kept in (None, there(old)):
            q, scale = there(zeros(nbytes)), there(zeros(scale_nbytes * count))
            if not getattr(module, f"{name}_encode")(q, scale, there(x), kept, block, *args):
                # What codes of random numbers had sent is added back by hosts, which rounds; see the next test.
                out.append(b"not finite")
                continue
            added, assigned = there(old), there(old)
            getattr(module, f"{name}_decode")(added, q, scale, block, *shape)
            getattr(module, f"{name}_decode")(assigned, q, scale, block, *shape, True)
            out += [raw(q), raw(scale), b"" if kept is None else raw(kept), raw(added), raw(assigned)]
        return out

    same(code)


@pytest.mark.commit(6)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize(("dither", "euclidean"), [(False, False), (True, False), (True, True)])
def test_whole_numbers_of_few_bits(bits: int, dither: bool, euclidean: bool) -> None:
    for n in SIZES:
        for kind in KINDS if n <= 257 else KINDS[:3]:
            for block in (8, 64, 1024)[n > 257 :]:
                check("linear", block, n, kind, bits, 2, (bits, euclidean, dither, KEY, STEP), (bits,))


@pytest.mark.parametrize("kind", KINDS)
def test_signs(kind: str) -> None:
    for n in SIZES:
        for block in (8, 64, 1024)[n > 257 :]:
            check("onebit", block, n, kind, 1, 2, (), ())


CODERS: dict[str, tuple[object, ...]] = {
    "int8": (), "linear": (4, False, False), "onebit": (),
}  # fmt: skip


@pytest.mark.parametrize("name", CODERS)
def test_a_residual_takes_the_finite_part_of_what_is_not_coded(name: str) -> None:
    n, block = 1000, 160
    x, old = numbers(n, 1), numbers(n, 2)
    x[700], x[990] = np.nan, -np.inf
    kept = []

    def code(module: ModuleType, there: Make) -> list[bytes]:
        residual, q, scale = there(old), there(zeros(n)), there(zeros(4 * -(-n // block)))
        assert not getattr(module, f"{name}_encode")(q, scale, there(x), residual, block, *CODERS[name])
        kept.append(residual.cpu().numpy())
        return []

    same(code)
    expected = np.where(np.isfinite(x), x + old, old)
    for residual in kept:
        np.testing.assert_allclose(residual, expected, rtol=1e-6, atol=1e-6)
    assert (kept[-1] == expected).all()  # the device has sent nothing, so it adds nothing back


@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 33), (1000, 33), (100_000, 777), (2**32 - 1, 50)])
def test_draws_take_one_of_each_stratum(n: int, k: int) -> None:
    src = numbers(min(n, 10**5), 1)

    def draw(module: ModuleType, there: Make) -> list[bytes]:
        idx, val = there(np.zeros(k, np.int32)), there(np.zeros(k, np.float32))
        module.draw_strata(idx, n, 2**32 - 99)
        if n == src.size:
            module.take(there(src), idx, val)
        return [raw(idx), raw(val)]

    same(draw)
