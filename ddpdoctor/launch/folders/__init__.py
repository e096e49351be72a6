"""Makes and finds the folders that a run is written to."""
