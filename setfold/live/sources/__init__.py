"""Where rows of live sets come from: files, folders, standard input, Kafka.

Each source divides its rows into batches that have an identity, so that a batch that is read again,
after a crash or by mistake, counts once.
"""
