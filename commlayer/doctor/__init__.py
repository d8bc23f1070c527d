"""`commlayer doctor`: finds problems on this machine that would prevent a run, without changing the machine."""
