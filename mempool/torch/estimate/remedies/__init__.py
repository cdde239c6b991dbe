"""Remedies for a job that does not fit: changes of the job, each tried by a fake run."""
