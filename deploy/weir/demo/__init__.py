"""The demo: a tiny model learns to use its tool, from an agent that only changed its `base_url`."""
