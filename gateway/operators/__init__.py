"""What operators are shown: the pipeline, warnings, and the archive of all sessions."""
