"""Rewards sessions that have ended: reads them from the gateway, has them graded, and posts the rewards."""
