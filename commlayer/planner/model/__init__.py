"""What a plan is about: machines, jobs, buckets, paths, options, and the rules that plans keep. Knows no prices."""
