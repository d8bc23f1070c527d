"""Certificates: the job's CA, invitations, and enrolment."""
