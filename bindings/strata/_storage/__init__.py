"""Files: weights, checkpoints, exports and traces, complete or absent.

Knows wrapped models. Must not know hooks, plans or reports.
In reading order: stored, weights, matching, conversion, initialise, adapters (values that come in);
replacing, checkpoint, checkpoint_files, checkpoint_manifest, rng, saved_values, extra_state,
export, exported, parameters, merged, tiled (files that take the place of others); saved_file (the
files of others); together, rank_board, rank_calls (what ranks do together); snapshots/ (what is
kept while training goes on); shards, saving (checkpoints of safetensors files); manifests (what of
all these says what); trace_file; ssd_folders (whose they are, and what dead runs left in them).
"""
