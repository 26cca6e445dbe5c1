"""The loss of a large vocabulary: its cases, its peers, its check, its benchmark."""
