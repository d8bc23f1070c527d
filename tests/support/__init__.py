"""What tests share: processes, jobs, cases, faults."""
