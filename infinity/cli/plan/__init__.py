"""`infinity-bench plan`: `arguments` and `command` read options; `hf_config`, `machines` and `here` give model and
machine; `answer` decides what fits; `report` and `plot` show it; `training_config` makes the config to train with."""
