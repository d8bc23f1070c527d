"""Implements `commlayer demo`: one machine alone, DDP, and commlayer train the same model on simulated
homes. Also has the small tasks of `commlayer tune` and of examples."""
