"""Prices of paths: time on each lane as a linear function of a bucket's size."""
