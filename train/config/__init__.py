"""What is trained and how: flags, architectures and controls, as data."""
