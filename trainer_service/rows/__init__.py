"""From a session's turns to rows, and from rows to packed micro-batches."""
