"""What a training step stores, and in how few bytes."""
