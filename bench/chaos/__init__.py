"""Breaks small jobs on purpose and checks what they keep: `python -m bench chaos`. Processes of a run import this package."""
