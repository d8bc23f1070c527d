"""Batch shares that follow measured step times."""
