"""What the gateway shows to operators: the pipeline, warnings, and the archive of all sessions."""
