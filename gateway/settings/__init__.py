"""The section `gateway` of the configuration, with every default."""
