"""Renders conversations with a model's own chat template, where `renderers` has no family for it."""
