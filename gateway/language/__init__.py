"""Turns messages into tokens and tokens into messages, for every supported chat template."""
