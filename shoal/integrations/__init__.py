"""Other libraries, one file per library; each is imported only by its own file."""
