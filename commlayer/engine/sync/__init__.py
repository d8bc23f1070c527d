"""Sync modes: every step, or local steps with their outer optimizer."""
