"""A wide-area network on one machine: hosts in namespaces, a native router between them. Knows nothing of what they run."""

from bench.lab.check import Check, sound
from bench.lab.lab import Lab, LabUnavailable, Link

__all__ = ["Check", "Lab", "LabUnavailable", "Link", "sound"]
