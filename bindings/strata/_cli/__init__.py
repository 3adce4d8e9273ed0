"""The command line: `strata finetune`, `demo`, `report`, `plan`, `estimate`, `io-tune`, `doctor`,
`snapshots`.

Knows everything else of the package; nothing else knows it. In reading order: main, options,
planner, estimate, io_tune, snapshots, doctor/; models, finetune/.
"""
