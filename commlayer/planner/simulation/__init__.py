"""A plan's step as a timeline: every task on its lane. Knows not what is good."""
