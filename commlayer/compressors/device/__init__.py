"""Codecs on CUDA devices."""
