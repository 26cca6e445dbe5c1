"""Condition numbers: speed, accuracy and the cost of a monitored step."""
