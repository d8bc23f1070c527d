"""A running job kept within its loss budget."""
