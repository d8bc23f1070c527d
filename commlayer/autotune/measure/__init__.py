"""Measurements of steps, links, codecs and learning, as input of planning."""
