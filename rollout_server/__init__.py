"""Keeps one SGLang engine alive and right: launch, watch, reload."""
