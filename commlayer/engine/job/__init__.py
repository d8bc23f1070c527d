"""One attached job: its plan, its terms, and what it reports."""
