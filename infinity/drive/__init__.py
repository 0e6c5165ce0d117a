"""The drive under a path: its description, measured rates, and I/O settings."""
