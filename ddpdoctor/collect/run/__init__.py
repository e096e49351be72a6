"""A run folder and what stands in it for the whole job."""
