"""Defines one attached job: its plan, its terms, and its reports."""
