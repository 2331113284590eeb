"""The gateway: answers OpenAI's and Anthropic's calls, records each turn, manages sessions and the fleet."""
