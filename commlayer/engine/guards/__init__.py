"""Checks that refuse or report what would make ranks diverge."""
