"""Predicts the bytes, memory and time of a step before it is run: numbers only."""
