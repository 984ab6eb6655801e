"""What a format makes of values: counts, exact."""
