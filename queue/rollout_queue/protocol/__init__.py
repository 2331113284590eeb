"""The HTTP messages that one service sends another, one class each: both ends import it. Knows no service."""
