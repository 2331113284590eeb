"""Runs grader objects on a sample and an item, whatever their type."""
