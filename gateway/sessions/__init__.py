"""Sessions, rewards and verdicts, and whose they are."""
