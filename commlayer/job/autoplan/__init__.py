"""The plan that nobody asked for: made from measured steps while the job trains, and made again when it is stale."""
