"""Automatic planning: when to plan again, trials of new plans, roll-back."""
