"""The attention of packed rows."""
