"""Trains models by the commands of users' own loops, in place of the turns of agents."""
