"""Reports of `allreduce-bench`; one file a format, and the parts that they share."""
