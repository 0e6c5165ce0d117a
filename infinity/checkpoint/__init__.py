"""Checkpoints and commits: writing, finding, reading, conversion."""
