"""What the ranks of `allreduce-bench` run. torch is imported inside functions."""
