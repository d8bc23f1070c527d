"""`commlayer estimate` and `commlayer plan`: the commands and their reports."""
