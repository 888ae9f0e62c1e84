"""Write generated events as NanoAOD keeps them: branches Jet_pt, Jet_eta, ... of one tree, Events.

python docs/examples/jets.py     # events.root

The events are a toy, not physics: two back-to-back axes, each with a few jets around it, of which
the soft ones are lost. In those that are called top, a side shares its momentum fairly among its
jets; in the others, one jet often has most of it.
"""

import awkward as ak
import numpy as np
import uproot

NUM_EVENTS, LEAST_PT = 4000, 20.0
random = np.random.default_rng(0)


def side(axis, is_top):
    """Jets (n, 4) around an axis (eta, phi): pt, eta, phi and mass."""
    number = 3 + random.poisson(1)
    shares = random.dirichlet(np.full(number, 3.0 if is_top else 1.0))
    pt = random.gamma(8.0, 40.0) * shares
    spread = random.normal(0, 0.6 if is_top else 0.5, (number, 2))
    eta, phi = (axis + spread).T
    return np.stack([pt, eta, (phi + np.pi) % (2 * np.pi) - np.pi, 0.1 * pt], axis=1)


def jets_of(is_top):
    """The jets of an event that are hard enough, hardest first."""
    eta, phi = random.normal(0, 1), random.uniform(-np.pi, np.pi)
    found = np.concatenate([side((eta, phi), is_top), side((-eta, phi + np.pi), is_top)])
    found = found[found[:, 0] > LEAST_PT * random.gamma(4.0, 1.0)]
    return found[found[:, 0].argsort()[::-1]].astype("f4")


is_top = np.arange(NUM_EVENTS) % 2 == 1
jets = [jets_of(label) for label in is_top]
counts, flat = [len(own) for own in jets], np.concatenate(jets).T
names = ("pt", "eta", "phi", "mass")
events = {
    "run": np.ones(NUM_EVENTS, "u4"),
    "luminosityBlock": np.arange(NUM_EVENTS, dtype="u4") // 500,
    "event": np.arange(NUM_EVENTS, dtype="u8"),
    "isTop": is_top,
    "MET_pt": random.gamma(2.0, 20.0, NUM_EVENTS).astype("f4"),
    "Jet": ak.zip({name: ak.unflatten(own, counts) for name, own in zip(names, flat, strict=True)}),
}
with uproot.recreate("events.root") as file:
    kinds = {n: v.type.content if isinstance(v, ak.Array) else v.dtype for n, v in events.items()}
    file.mktree("Events", kinds).extend(events)
    file.mktree("Runs", {"run": "u4"}).extend({"run": np.array([1], "u4")})
