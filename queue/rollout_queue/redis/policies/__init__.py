"""The register of policies: version numbers, and the plan that says which version the fleet serves."""
