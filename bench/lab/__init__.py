"""A wide-area network on one machine: hosts in network namespaces, connected by a native router."""

from bench.lab.lab import Lab, LabUnavailable, Link
from bench.lab.self_check import Check, check, sound

__all__ = ["Check", "Lab", "LabUnavailable", "Link", "check", "sound"]
