"""`weir audit`: anybody can check that every turn is trained once, waiting, or closed with a verdict."""
