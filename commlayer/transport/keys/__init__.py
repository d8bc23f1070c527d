"""Authenticates connections: a node's keys, TLS, and proofs of the job's secret."""
