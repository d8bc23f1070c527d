"""Starts a job: rendezvous, choice of the plan, connections, and joining a running job."""
