"""Changes of a running job: its members and its plan, and the state that joining ranks receive."""
