"""Everything that knows FSDP2: what it shards and gathers, under which names, and its levers."""
