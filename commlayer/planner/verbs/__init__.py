"""Questions about plans: explain, diff, lint, what-if. Each returns records and prints nothing."""
