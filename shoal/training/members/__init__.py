"""Where the members of a step live."""
