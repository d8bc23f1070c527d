"""Calls to the coordinator: messages, channels, and the port that serves them."""
