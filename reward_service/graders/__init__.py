"""OpenAI's graders: their objects, their templates, and the arithmetic of those that call no model."""
