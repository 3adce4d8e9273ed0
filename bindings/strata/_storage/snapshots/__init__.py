"""Snapshots: the state after a step, kept while training goes on.

Knows wrapped models, and the files of checkpoints. Must not know hooks, plans or reports.
In reading order: format (what lies where on the disk), context (what is in no page), capture
(strata.snapshot()), commit (how one process brings it to the disk, readable alone), links and
series (names of page files, and folders: how they come and go), kept (whose slots a session holds),
durability; load, adopt, check, source, elements, pages (the way back); ranks and parts (the same
commit by all ranks of a run), machines.
"""
