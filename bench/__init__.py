"""Benchmarks: every kernel against every peer, checked before it is timed."""
