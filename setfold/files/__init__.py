"""Encode sets that are stored in files, with bounded memory.

Read the modules in this order:

    api.py       the public functions: encode_sets, merge_states, readout_states
    request.py   their options, and what follows from them
    execute.py   completes a request: nothing to do, the rest of an interrupted run, or a new run
    plan.py      inspects the inputs and splits them into shards
    engines/     turn shards into tables of partial states, in this process or on a Ray cluster
    run.py       reads, merges and writes; saves checkpoints on the way
    journal.py   the work folder: checkpoints, and what a resumed run needs
    work_folder.py  locks the outputs; moves complete outputs to their final names
    tables/      tables of states, in memory and spilled to disk
    inputs.py    from paths to open files; readers/ has one reader for each file format
    partials.py  the same steps as plain functions on Arrow tables, for Dask, Spark and others
"""
