"""How long a process waits for others, as derived from the settings."""

from __future__ import annotations

from commlayer.config.settings import Config

LEAST_UNHEARD_S = 5.0
NOTICE_HEARTBEATS = 3
"""Number of heartbeat intervals that servers keep running after an error, so other workers learn from the coordinator which
worker left or died."""


def reconnect_window_s(config: Config) -> float:
    return min(config.reconnect_s, config.deadline_s)


def notice_s(config: Config) -> float:
    """Seconds within which every worker has received news from the coordinator with its heartbeats."""
    return NOTICE_HEARTBEATS * config.heartbeat_s


def verdict_s(config: Config) -> float:
    """Seconds from a peer's last heartbeat until a worker has the coordinator's decision whether this peer is dead."""
    return config.dead_after_s + notice_s(config)


def continue_wait_s(config: Config) -> float:
    """Additional seconds that a worker waits after its own deadline, if the worker can continue without other workers. Within
    this time the coordinator decides whether silent peers are dead and sends the decision."""
    return reconnect_window_s(config) + verdict_s(config)


def broken_after_s(config: Config) -> float:
    """Seconds without a TCP acknowledgement after which a data connection counts as broken. If connections can be restored, the
    time is short, since a wrong decision about a slow receiver costs little."""
    window_s = reconnect_window_s(config)
    return min(config.deadline_s, max(LEAST_UNHEARD_S, window_s / 4)) if window_s else config.deadline_s
