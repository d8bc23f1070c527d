"""Traces of steps, comparison with predictions, fidelity of sent gradients, and link monitoring. Callers measure."""
