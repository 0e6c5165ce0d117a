"""Which drive lies under a path, what it gives, and how it is driven."""
