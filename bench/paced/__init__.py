"""Training races: hosts of a given speed over shaped links. bench.tta chooses which systems are compared."""
