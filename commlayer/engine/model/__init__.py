"""Reads a script's model and optimizer, and computes digests to compare them between ranks."""
