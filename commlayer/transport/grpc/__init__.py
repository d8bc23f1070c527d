"""Byte channels over gRPC, for networks that allow only HTTP/2."""
