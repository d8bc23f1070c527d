"""What tests share: processes, jobs, cases, faults."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The root of the repository."""
