"""API keys by name: where they come from, what each may use, and when it was used last."""
