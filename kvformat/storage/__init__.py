"""Where bytes live. Knows paths, files and mappings, and nothing of the format."""
