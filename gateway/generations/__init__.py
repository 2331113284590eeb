"""A generation is one answer to a call. It is sampled on the fleet and recorded as a turn."""
