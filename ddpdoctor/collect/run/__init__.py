"""A run folder, and the facts in it about the whole job."""
