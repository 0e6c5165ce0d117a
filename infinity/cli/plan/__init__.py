"""Floor 17. `infinity-bench plan`: `command` asks by `arguments`; `model`, `hf_config`, `machines`, `here` say what and where;
`report`, `frozen_report` and `plot` tell; `training_config` is what one trains with then, `remedies` what else to ask for."""
