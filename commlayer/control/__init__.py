"""The control plane: who takes part in a job, and who has died or left. Small messages on their own connections."""
