"""Checkpoints of a job, on disk."""
