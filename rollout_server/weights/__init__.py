"""The files of a policy: where they may come from, how they are copied here, and their verification."""
