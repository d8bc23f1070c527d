"""Every carrier and wrapper keeps the same promises."""

from __future__ import annotations

import pytest
from support.meshes import MESHES
from support.transport_cases import CASES, large, sums

MANY = ["loopback", "shaped", "faulty", "tcp", "far"]
"""Of any number of ranks; on the others connections are dear."""
SIZES = [(name, n) for name in MESHES for n in ([1, 2, 3, 5, 9] if name in MANY else [3])]


@pytest.mark.parametrize(("carrier", "n"), SIZES)
def test_sums(carrier: str, n: int) -> None:
    sums(MESHES[carrier], n)


@pytest.mark.parametrize("carrier", MESHES)
@pytest.mark.parametrize("case", CASES)
def test_case(carrier: str, case: str) -> None:
    CASES[case](MESHES[carrier])


@pytest.mark.parametrize("carrier", ["tcp", "tls", "grpc", "grpc+tls"])
def test_bodies_larger_than_all_buffers(carrier: str) -> None:
    large(MESHES[carrier])
