"""Damaged and hostile files: every kind that setfold reads, mutated at random.

    mutations.py   damage bytes: bits, blocks, lengths, truncation
    documents.py   damage JSON: values, types, keys, depth
    archives.py    damage what is inside zip and gzip files, with valid checksums
    kind.py        `Kind`: how to make a sample, damage it, read it, and judge the result
    saved.py       models and states
    tables.py      state files and encodings
    runs.py        the work folder of an interrupted run
    samples.py     more samples of input formats
    inputs.py      one kind for each format that can be read
    worker.py      a process that tries mutations one after the other, within limits
    driver.py      starts workers, notices crashes and hangs, collects the outcomes

`python -m tests.fuzz --count 10000` tries all kinds; `python -m tests.fuzz hdf5 --first 17 --count 1`
repeats one mutation.
"""
