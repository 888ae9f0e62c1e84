"""The tables of a store, as SQLite creates them; other databases translate the types."""

from __future__ import annotations

SCHEMA = """
CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE models (number INTEGER PRIMARY KEY, digest TEXT NOT NULL, content BLOB NOT NULL,
    active INTEGER NOT NULL, since INTEGER NOT NULL);
CREATE TABLE states (model INTEGER NOT NULL, name BLOB NOT NULL, bucket INTEGER NOT NULL,
    count INTEGER NOT NULL, checksum BLOB NOT NULL, state BLOB NOT NULL);
CREATE UNIQUE INDEX states_of_sets ON states (model, name, bucket);
CREATE TABLE batches (source TEXT NOT NULL, key TEXT NOT NULL, digest BLOB NOT NULL,
    sequence INTEGER NOT NULL, at INTEGER NOT NULL, PRIMARY KEY (source, key)) WITHOUT ROWID;
CREATE TABLE fills (source TEXT NOT NULL, key TEXT NOT NULL, model INTEGER NOT NULL,
    digest BLOB, PRIMARY KEY (source, key, model)) WITHOUT ROWID;
CREATE TABLE positions (source TEXT NOT NULL, part TEXT NOT NULL, next INTEGER NOT NULL,
    at INTEGER NOT NULL, PRIMARY KEY (source, part)) WITHOUT ROWID;
CREATE TABLE deletions (name BLOB PRIMARY KEY, sequence INTEGER NOT NULL, at INTEGER NOT NULL)
    WITHOUT ROWID;
"""
MIGRATIONS = {  # from each older version to the next one
    1: "ALTER TABLE fills ADD COLUMN digest BLOB",
}
VERSION = 1 + max(MIGRATIONS)
BUCKETS = "CREATE INDEX states_of_buckets ON states (bucket)"  # for expiry
