"""Training that resumes at the step where it was stopped."""
