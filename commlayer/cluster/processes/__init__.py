"""Processes and their groups: children, collectives of a script, and groups of ranks in several sites."""
