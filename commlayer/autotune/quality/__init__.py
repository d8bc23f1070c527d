"""The quality guard: the compression level that keeps the loss."""
