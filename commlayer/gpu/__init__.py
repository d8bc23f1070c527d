"""Starts CUDA kernels, for codecs and optimizers alike. Knows files and launchers, not what a kernel does."""
