"""What follows from the measurements of `allreduce-bench`."""
