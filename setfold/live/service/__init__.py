"""An HTTP service on a store of live sets: updates, encodings, deletions and changes.

    app.py        the endpoints: read this first
    describe.py   what their description says; page.py: the same as a page
    server.py     binds, serves, and stops without losing what was accepted
    gate.py       every request passes it: token, metrics
    messages.py   bodies, answers and errors
    updates.py    the rows of a request, as JSON or as an Arrow stream (streams.py)
    queue.py      the queue of updates; those that wait share a transaction
    reads.py      encodings as JSON or as an Arrow stream
    changes.py    server-sent events
    threads.py    work that would block, in a bounded number of threads
    metrics.py    counts for Prometheus
    options.py    limits and the token

It needs the extra `serve`: pip install 'setfold[serve]'.
"""

from setfold.live.service.app import make_app
from setfold.live.service.options import ServiceOptions
from setfold.live.service.server import serve

__all__ = ["ServiceOptions", "make_app", "serve"]
