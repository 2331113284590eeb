"""Runs one SGLang engine: starts it, watches it, and loads the policy versions that the fleet serves."""
