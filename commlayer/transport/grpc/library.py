"""Imports gRPC with its log turned off. gRPC reads its settings once, so all modules import it from here."""

from __future__ import annotations

from commlayer import config

config.quiet_grpc()
import grpc  # noqa: E402
import grpc.aio  # noqa: E402

__all__ = ["grpc"]
