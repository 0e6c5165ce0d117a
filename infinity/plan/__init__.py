"""What a step takes in bytes, memory and time, before it is run: numbers only."""
