"""The edges: config files, the command line, the page."""
