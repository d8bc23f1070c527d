"""What a connection uses to authenticate: a node's keys, TLS, and proofs of the job's secret."""
