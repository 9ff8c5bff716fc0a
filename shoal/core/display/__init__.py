"""What a person sees of long work, numbers and objects: text, bars, and figures in notebooks."""
