"""Summation servers: sums, their journal, and the connections to them."""
