"""The command line: from what was typed to a result."""
