"""The bodies of the Tinker SDK, in JSON and in protobuf, and what they mean in Weir."""
