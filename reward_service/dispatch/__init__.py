"""Rewards sessions by rules: finds those that wait for a reward, has them graded, and posts the rewards."""
