"""The files of a policy: where they are, how they come here, and whether they are whole."""
