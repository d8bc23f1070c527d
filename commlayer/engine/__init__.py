"""Executes a plan: gradient hooks, the step loop, buckets, residuals, paths, local steps, guards, checkpoints."""
