"""The demo: a tiny model learns to use its tool from the calls of an ordinary OpenAI client."""
