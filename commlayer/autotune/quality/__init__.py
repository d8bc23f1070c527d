"""Keeps codecs fine enough for the loss budget: comparisons with exact gradients, and decisions from them."""
