"""The automatic plan: when to plan again, trials, roll-back."""
