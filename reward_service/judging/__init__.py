"""Asks models to grade: what they are asked, and how their answers are read."""
