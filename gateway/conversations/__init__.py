"""A session's calls as a tree of turns: where each prompt belongs, and which tokens it adds there."""
