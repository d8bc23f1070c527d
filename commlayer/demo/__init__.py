"""Implements `commlayer demo`: one machine alone, DDP, and commlayer train the same model on simulated homes. Also has the
small task of examples and benches."""
