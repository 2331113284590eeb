"""`weir audit`: checks that every turn was trained once, waits, or has a final verdict."""
