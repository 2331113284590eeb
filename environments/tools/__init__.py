"""Tools that come from elsewhere than the environment: those of MCP servers."""
