"""Drives a step: from the backward pass to the optimizer's step and the next forward pass."""
