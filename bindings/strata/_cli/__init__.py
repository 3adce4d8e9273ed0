"""The command line: `strata finetune`, `demo`, `report`, `plan`, `estimate`, `io-tune`.

Knows everything else of the package; nothing else knows it. In reading order: main;
planner_options, planner_machine, answer, whatif, estimate, io_tune; finetune_options and the other
files of finetune, demo.
"""
