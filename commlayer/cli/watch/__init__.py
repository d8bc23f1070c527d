"""The commands that show a job: top, log, report and trace."""
