"""`/v1/responses`: its objects, its stored answers, and its dialect."""
