"""Reports of `allreduce-bench`, with one file per format and their shared parts."""
