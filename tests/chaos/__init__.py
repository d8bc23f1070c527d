"""Chaos tests: `python -m bench chaos` injects faults into small jobs and checks their guarantees."""
