"""The experiments' own environments: classes as docs/environments.md describes them."""
