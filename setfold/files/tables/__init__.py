"""Tables of many sets: their states, as Arrow, merged and kept within a bound of memory."""
