"""Where pieces of files become partial states: in this process, or on a Ray cluster."""
