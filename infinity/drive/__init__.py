"""The drive under a path: its description, its measured rates, and the settings to drive it with."""
