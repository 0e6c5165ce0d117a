"""Policy: what to move, and when. Integers in, decisions out; no torch, no I/O."""
