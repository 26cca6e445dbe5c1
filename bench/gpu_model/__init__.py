"""A GPU in software: compiled kernels, executed on the CPU and checked; see README.md."""
