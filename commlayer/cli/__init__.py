"""The command line: one small module per command. Each imports what it needs only when it runs."""
