"""The trainer's lease: only its holder trains."""
