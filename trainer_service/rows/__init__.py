"""From sessions to the rows of a batch."""
