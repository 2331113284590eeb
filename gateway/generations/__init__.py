"""Generations: one answer each, sampled on the fleet and recorded as a turn."""
