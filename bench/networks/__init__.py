"""Benchmarks of whole vision and language models: rows, peers and correctness gates."""
