"""How the networks of members are stacked, called and run, on one device or in several parts."""
