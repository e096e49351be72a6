"""The code that each rank of `allreduce-bench` runs. torch is imported inside functions."""
