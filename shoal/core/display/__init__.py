"""What a person sees of long work, numbers and objects."""
