"""Processes and their groups: children, collectives and rows of all ranks, and groups of ranks in several sites."""
