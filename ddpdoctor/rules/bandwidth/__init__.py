"""Rules and conclusions about the measurements of `allreduce-bench`."""
