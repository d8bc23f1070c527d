"""The worker's side: executes a plan in lanes; ordering, commit, rollback. The only mutable heart of the package."""
