"""One optimizer step: what is known before it, the step itself, and what it says of itself."""
