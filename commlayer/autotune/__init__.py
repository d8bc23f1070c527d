"""Measures steps and links while training runs, and changes the plan, its codecs and each rank's share of the batch."""
