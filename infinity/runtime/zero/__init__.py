"""Floor 14. The paths under which scripts import the memory estimators: `infinity.runtime.zero.stage3`, `.stage_1_and_2`."""
