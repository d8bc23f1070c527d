"""Presents a running job to people: its view, answers, costs, story and alerts."""
