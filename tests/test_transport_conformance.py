"""Every carrier and wrapper keeps the same promises."""

from __future__ import annotations

import pytest
from transport_kit import CASES, MESHES, sums


@pytest.mark.parametrize("carrier", MESHES)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 9])
def test_sums(carrier: str, n: int) -> None:
    sums(MESHES[carrier], n)


@pytest.mark.parametrize("carrier", MESHES)
@pytest.mark.parametrize("case", CASES)
def test_case(carrier: str, case: str) -> None:
    CASES[case](MESHES[carrier])
