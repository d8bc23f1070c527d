"""Codecs on a CUDA device."""
