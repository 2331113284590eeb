"""The gateway: serves OpenAI's and Anthropic's HTTP, records each turn, keeps sessions and the fleet."""
