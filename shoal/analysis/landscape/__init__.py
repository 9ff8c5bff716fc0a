"""How different the members are, and what lies between them."""
