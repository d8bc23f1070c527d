"""The pages of docs/reference that come from the code, a module for each page."""
