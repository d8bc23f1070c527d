"""Measures while training runs, and changes the plan, its quality and the batch shares."""
