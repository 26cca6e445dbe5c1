"""Condition numbers: how fast, how true, and what a monitored step costs."""
