"""Draws: members of a trained run become chains that sample the posterior."""
