"""Runs one rank's part in a step: collects gradients, exchanges them on paths, and writes averages."""
