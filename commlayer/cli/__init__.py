"""The command line: one small module per command, which import what they need only when they run."""
