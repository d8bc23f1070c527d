"""Searches for plans of a running job, in a process of their own."""
