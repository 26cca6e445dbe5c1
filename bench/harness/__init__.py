"""Shared by all benchmarks: clocks, counters, machine facts and the correctness gate."""
