"""Images in prompts: which a model reads, how they are decoded, and where they lie among the tokens."""
