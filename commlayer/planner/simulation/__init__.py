"""Simulates a plan's step as a timeline, with every task on its lane."""
