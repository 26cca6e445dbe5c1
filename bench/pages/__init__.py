"""What the pages of results are rendered from: words, tables and pictures."""
