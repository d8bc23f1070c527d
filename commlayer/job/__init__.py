"""One attached job, from its start to its close: what happens around steps and between them. Knows models by hooks."""
