"""`python -m bench storms`: homes that come and go, in time-lapse."""
