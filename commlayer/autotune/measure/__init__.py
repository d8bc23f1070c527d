"""Measurements of steps, links and codecs."""
