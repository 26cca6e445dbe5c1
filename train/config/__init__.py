"""What is trained and how: flags, recipes and architectures, as data."""
