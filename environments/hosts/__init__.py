"""Hosts: processes that run environments in the Python environment of their library."""
