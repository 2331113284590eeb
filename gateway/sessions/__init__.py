"""Sessions: who owns them, which of them a call belongs to, their verdicts, and how long they are kept."""
