"""The search for a plan: options, scenarios, choices, placement on servers, and the reasons of what was chosen."""
