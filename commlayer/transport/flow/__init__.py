"""Limits: bytes in flight of a connection, the share of the link, and the shares of several sources."""
