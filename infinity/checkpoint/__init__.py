"""Checkpoints and commits: written, found, read and changed into one another."""
