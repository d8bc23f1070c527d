"""Paths: the ways to sum a bucket over all workers (servers, all-reduce, compressed collectives, or a sum inside each node
first)."""
