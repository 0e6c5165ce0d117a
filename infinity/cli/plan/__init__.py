"""Floor 17. `infinity-bench plan`: `command` asks, `model`, `machines`, `here` say what and where, `report` and `plot` tell,
`remedies` what else to ask for."""
