"""The Tinker SDK's HTTP interface: users run their own training loop against Weir's trainer and engines."""
