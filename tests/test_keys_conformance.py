"""Everything that a Transport promises, over TLS: between ends of one machine, and of two."""

from __future__ import annotations

import functools

import pytest
from keys_kit import Folders, made_folders  # noqa: F401  (a fixture)
from transport_kit import CASES, FAR, SMALL_BUFFERS, exchange, in_threads, sums, tcp_mesh

from commlayer.transport.key_folder import Keys


@pytest.mark.parametrize("host", ["127.0.0.1", FAR])
@pytest.mark.parametrize("case", CASES)
def test_over_tls(case: str, host: str, folders: Folders) -> None:
    CASES[case](functools.partial(tcp_mesh, settings=SMALL_BUFFERS._replace(keys=Keys(folders.worker)), host=host))


@pytest.mark.parametrize("host", ["127.0.0.1", FAR])
def test_sums_over_tls(host: str, folders: Folders) -> None:
    sums(functools.partial(tcp_mesh, settings=SMALL_BUFFERS._replace(keys=Keys(folders.worker)), host=host), 3)


def test_bodies_larger_than_all_buffers_pass_both_ways_at_once(folders: Folders) -> None:
    with tcp_mesh(2, SMALL_BUFFERS._replace(keys=Keys(folders.worker))) as transports:
        assert in_threads(transports, lambda t: [exchange(t, 24 << 20, step) for step in range(2)]) == [[2, 2], [1, 1]]
