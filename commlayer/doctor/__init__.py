"""`commlayer doctor`: finds what would prevent a run on this machine. Gathers facts, then judges them; changes nothing."""
