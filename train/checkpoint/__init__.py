"""Checkpoints: write them, read them, and manage the run folder."""
