"""What `bench transport` says of its rows, and that servers and Gloo add up the same there."""

from __future__ import annotations

import pytest

from bench import transport, transport_server, transport_sums


def row(where: str, *, body: str = transport.BODY, void: bool = False, **more: float) -> dict[str, object]:
    return {"where": where, "body": body, "void": void, "plain_gb_s": 0.01, "socket_gb_s": 0.0115, "vs_socket": 0.9} | more


def test_ways_are_compared_on_loopback_and_on_a_line_and_a_line_with_its_bits() -> None:
    found = transport.summarised([
        row("loopback", tls_vs_plain=0.5, grpc_vs_tcp=0.2), row("loopback", body="64 KiB", tls_vs_plain=0.4, grpc_vs_tcp=0.1),
        row("1 Gb/s", tls_vs_plain=0.8, grpc_vs_tcp=0.7), row("100 Mb/s, 150 ms")])
    assert found == {
        "tls_vs_plain_loopback": 0.5, "grpc_vs_tcp_loopback": 0.2, "tcp_vs_socket_loopback": 0.9,
        "tls_vs_plain": 0.8, "grpc_vs_tcp": 0.7, "tcp_vs_socket_1g": 0.9,
        "tcp_vs_line_1g": pytest.approx(0.08), "socket_vs_line_1g": pytest.approx(0.092),
        "tcp_vs_socket_100m_150ms": 0.9,
        "tcp_vs_line_100m_150ms": pytest.approx(0.8), "socket_vs_line_100m_150ms": pytest.approx(0.92)}


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
