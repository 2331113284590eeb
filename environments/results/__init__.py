"""What a run leaves: its journal, its summary, its picture."""
