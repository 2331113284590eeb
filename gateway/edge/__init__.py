"""The agents' HTTP side: every model call is read here, and its answer is written here."""
