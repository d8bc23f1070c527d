"""Observers of training: traces, inspection, and checks of the plan's predictions."""
