"""setfold side by side with its peers: time, memory, precision, and the targets set for them.

    python -m bench            everything, in about ten minutes on one core
    python -m bench --quick    the same code on tiny sizes, in seconds

READ FIRST: plan.py says what is measured, peers.py on whom, timing.py how. All times are CPU times
of one thread and only their ratios matter: contenders take turns, so that whatever slows the
machine slows them all.

    plan.py       shapes, sizes and bounds
    peers.py      the modules that are compared; to add one, write a class and a line
    timing.py     the interleaved stop-watch
    memory.py     peak memory, each measurement in a process of its own
    results.py    what is measured and what was promised, as values
    speed.py      targets 1 and 3: whole sets, against every peer
    precision.py  target 4: what float64 states cost and what they are good for
    streams.py    targets 5 and 6: many short sets, many small updates
    machine.py    the CPU and the versions behind the numbers
    report.py     tables and JSON;  plots.py  figures
"""
