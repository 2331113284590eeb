"""Responses that are kept in Redis, also those that are made while no client waits."""
