"""What a run's numbers show: monitors of training."""
