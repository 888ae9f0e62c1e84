"""Engines turn shards into tables of partial states, in this process or on a Ray cluster."""
