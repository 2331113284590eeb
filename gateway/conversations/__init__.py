"""Where a call stands in its session's tree of turns."""
