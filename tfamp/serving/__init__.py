"""SavedModels and LiteRT files in a chosen precision, verified."""
