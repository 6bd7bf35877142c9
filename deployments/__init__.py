"""Ray Serve deployments and the builder that wires them."""
