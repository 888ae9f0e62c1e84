"""A page on which sets arrive element by element: `make live`."""
