"""Gives versions their numbers, publishes them through the gateway, and holds them back."""
