"""Benchmark of setfold and comparable libraries: time, memory, precision, and performance targets.

    python -m bench                      everything, in about half an hour on one core
    python -m bench --quick              the same code on tiny sizes, in about a minute
    python -m bench --only PART          one part: peers, sizes, kernels, encoders, ...

It writes benchmark.md and its pictures; docs/ has a copy of them.

Read plan.py (what is measured), peers.py and encoders.py (which modules) and timing.py (how) first.
All times are CPU times of one thread, and only ratios matter. The compared modules run in turn, so
that a slow phase of the machine affects all of them.

    plan.py       shapes, sizes and bounds
    modules.py    the compared modules, built from a shape
    peers.py      the Slot Set Encoder and its peers; to add one, write a class and a line
    encoders.py   every encoder of setfold and its library peer; to add one, a function and a line
    timing.py     the interleaved timer
    results.py    dataclasses for measurements and targets
    speed.py      targets 1, 3, 7, 11, 12 and 13: whole sets, all peers and all encoders
    instructions.py  compiled kernels by instruction set;  roofline.py, peak.c  its limits
    folds.py      setfold.fold compared with one call on the whole set
    memory.py     targets 2 and 8: peak memory, each measured in a separate process
    gradients.py  target 9: training steps by kind of gradient;  disk.py  one step from a file
    precision.py  target 4: cost and accuracy of float64 states
    streams.py    targets 5 and 6: many short sets, many small updates
    files.py      target 10: sets in files
    frames.py     target 14: sets in data frames
    live.py       target 15: live sets;  stores.py  their databases;  server.py  PostgreSQL
    serve.py      the service of live sets under load
    machine.py    CPU, versions and allocator
    report.py     tables and JSON;  plots.py  figures
"""
