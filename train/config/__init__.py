"""Flags, architectures and controls of training runs."""
