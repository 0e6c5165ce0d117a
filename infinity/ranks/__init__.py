"""What the ranks of a job tell each other: that one of them failed."""
