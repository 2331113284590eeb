"""The front door: OpenAI's HTTP in, recorded turns out; sessions, the fleet, the operator's side."""
