"""Finds a good plan by search over simulated steps."""
