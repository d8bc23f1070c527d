"""What this machine and its network cost: codecs, buckets, collectives, links, and a model's step. Plans nothing."""
