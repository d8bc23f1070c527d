"""What `bench transport` says of its rows, and that servers and Gloo add up the same there."""

from __future__ import annotations

import pytest

from bench import transport, transport_server, transport_sums


def row(where: str, *, void: bool = False) -> dict[str, object]:
    return {"where": where, "body": "4 MiB", "void": void, "plain_gb_s": 0.01, "vs_socket": 0.9, "tls_vs_plain": 0.8,
            "grpc_vs_tcp": 0.7}


def test_a_line_is_compared_with_a_socket_and_with_its_bits() -> None:
    found = transport.summarised([row("1 Gb/s")])
    assert found == {"tls_vs_plain_1Gb/s_4MiB": 0.8, "grpc_vs_tcp_1Gb/s_4MiB": 0.7, "tcp_vs_socket_1g": 0.9,
                     "tcp_vs_line_1g": pytest.approx(0.08)}


def test_void_rows_say_nothing() -> None:
    assert transport.summarised([row("1 Gb/s", void=True), {"where": "100 Mb/s, 150 ms", "void": True, "why": "no root"}]) == {}


def test_sums_agree_and_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_sums, "RANKS", (2,))
    rows, summary = transport_sums.run(quick=True)
    assert [r["body"] for r in rows] == list(transport_sums.IN_QUICK)
    assert summary.keys() == {"tcp_vs_gloo_n2", "small_roundtrip_vs_gloo"}


def test_a_servers_adding_is_compared_with_memorys_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_server, "FLOATS", 1 << 16)
    (row,), summary = transport_server.run(quick=True)
    assert row["server_gb_s"] > 0 < row["stream_gb_s"]
    assert summary.keys() == {"server_add_vs_stream"}
