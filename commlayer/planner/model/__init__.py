"""The planner's model: machines, jobs, buckets, paths, options, and the rules that every plan keeps."""
