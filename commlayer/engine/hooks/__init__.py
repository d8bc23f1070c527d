"""Attaches commlayer to torch: callbacks, the order of forward passes, and checks for aliases."""
