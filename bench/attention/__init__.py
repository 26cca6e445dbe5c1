"""Attention of every kind: its cases, its peers, the checks of both, and their benchmarks."""
