"""Starts CUDA kernels for codecs and optimizers."""
