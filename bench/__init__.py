"""setfold side by side with its peers: time, memory, precision, and the targets set for them.

    python -m bench            everything, in less than half an hour on one core
    python -m bench --quick    the same code on tiny sizes, in about a minute

With --only peers, encoders or gradients, one part of it.

READ FIRST: plan.py says what is measured, peers.py and encoders.py on whom, timing.py how. All times
are CPU times of one thread and only their ratios matter: contenders take turns, so that whatever
slows the machine slows them all.

    plan.py       shapes, sizes and bounds
    modules.py    the modules that are compared, made from a shape
    peers.py      the Slot Set Encoder and its peers; to add one, write a class and a line
    encoders.py   every encoder of setfold, beside its library peer; to add one, a function and a line
    timing.py     the interleaved stop-watch
    results.py    what is measured and what was promised, as values
    speed.py      targets 1, 3 and 7: whole sets, against every peer and for every encoder
    folds.py      setfold.fold beside one call on the whole set
    memory.py     targets 2 and 8: peak memory, each measurement in a process of its own
    gradients.py  target 9: training steps, by how gradients are found;  disk.py  one from a file
    precision.py  target 4: what float64 states cost and what they are good for
    streams.py    targets 5 and 6: many short sets, many small updates
    machine.py    the CPU and the versions behind the numbers, and its allocator
    report.py     tables and JSON;  plots.py  figures
"""
