"""From weights on disk to a version that the fleet serves."""
