"""Membership, coordinator, summation servers, homes, keys."""
