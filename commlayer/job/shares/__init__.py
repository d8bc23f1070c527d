"""Shares of the batch that follow how fast each worker is, while the job trains."""
