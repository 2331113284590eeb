"""Policies: their files, changes between two of them, which ones are served, and canaries."""
