"""Which version the fleet serves: numbers, files, the gateway, and holding a version back."""
