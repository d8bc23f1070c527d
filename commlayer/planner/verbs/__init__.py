"""What can be asked about plans: explain, diff, lint, what-if. Makes records; prints nothing."""
