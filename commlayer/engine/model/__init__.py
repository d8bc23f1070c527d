"""What commlayer reads from a script's model and optimizer, and digests to compare them between ranks."""
