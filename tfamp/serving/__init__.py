"""SavedModels in float32, verified."""
