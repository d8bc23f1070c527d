"""Traces of steps, comparison with predictions, fidelity of sent gradients, and link monitoring. Other packages call these
functions and supply the measurements."""
