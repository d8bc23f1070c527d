"""Membership, coordinator, summation servers, sites, keys."""
