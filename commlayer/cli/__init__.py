"""The command line, with one small module per command. Modules load their dependencies only when the command runs."""
