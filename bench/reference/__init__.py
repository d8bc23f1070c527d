"""Published methods, kept to compare with. Nothing here is part of what a job runs."""
