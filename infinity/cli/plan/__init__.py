"""`infinity-bench plan`: `command` asks by `arguments`; `model`, `hf_config`, `machines`, `here` say what and where;
`answer` decides what fits, and `remedies` what else to ask for; `report`, `frozen_report` and `plot` tell; `training_config` is
what one trains with then."""
