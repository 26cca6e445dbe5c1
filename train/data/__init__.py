"""Data loading: sources of images, text and sequences, their order, and bad samples."""
