"""Admission: decides by the limits in the settings whether a call or a new session is accepted now."""
