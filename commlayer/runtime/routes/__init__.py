"""The ways of a bucket: over a summation server, or through stages of collectives."""
