"""Published methods for comparison. Jobs never run this code."""
