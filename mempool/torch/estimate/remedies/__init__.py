"""Remedies for a job that does not fit: changes of the job, each tried, and their models and optimizers."""
