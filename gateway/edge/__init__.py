"""The agents' door: every call comes in here, and its answer goes out."""
