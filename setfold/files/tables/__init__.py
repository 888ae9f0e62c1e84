"""Tables of many sets and their states: as Arrow, merged, and spilled to disk."""
