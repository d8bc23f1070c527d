"""Automatic planning: a plan made from measured steps while the job trains, and another when that one no longer holds."""
