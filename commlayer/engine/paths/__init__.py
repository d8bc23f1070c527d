"""How a bucket is summed: by servers, all-reduce, coded collectives, or a node first."""
