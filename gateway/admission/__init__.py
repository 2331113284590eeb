"""Admission: rates, budgets and quotas of callers, and room in the queue."""
