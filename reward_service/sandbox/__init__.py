"""Runs the source of Python graders in processes of their own, with limits and without the service's keys."""
