"""What people are told about a running job: its view, answers, costs, story and alerts."""
