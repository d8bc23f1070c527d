"""Buckets: memory, residuals, results, and the state of the current step."""
