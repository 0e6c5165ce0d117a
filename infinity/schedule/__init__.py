"""What to move and when: integers in, decisions out; no torch, no I/O."""
