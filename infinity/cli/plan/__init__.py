"""`infinity-bench plan`: `command` asks by `arguments`; `hf_config`, `machines` and `here` say what and where; `answer` decides
what fits, and what else to ask for; `report` and `plot` tell; `training_config` is what one trains with then."""
