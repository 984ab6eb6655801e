"""What a GPU shows in a quarter of an hour: `tfamp gpu-report`, scripts/gpu_plan.py."""
