"""`commlayer chaos`: a small job of real processes, faults that are dealt out by a seed, and what must be true afterwards."""
