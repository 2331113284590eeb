"""The HTTP side: OpenAI's routes for files and jobs."""
