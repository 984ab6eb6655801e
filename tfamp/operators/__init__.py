"""Single operators: what they compute in, whatever layer they are in."""
