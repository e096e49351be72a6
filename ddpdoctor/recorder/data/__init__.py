"""How data loaders divide the data among ranks."""
