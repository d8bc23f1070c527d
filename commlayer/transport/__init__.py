"""Links between peers: carriers, wrappers, the summation service and groups. Knows bytes and peers; no codec, plan or model."""
