"""Implements `commlayer demo`: trains one model over a slow link, uncompressed and compressed, and compares the runs."""
