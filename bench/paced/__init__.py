"""Training against the clock: hosts of one speed over shaped links. Knows how a run is made, not which are compared."""
