"""What would help a job to fit: changes of the job, each tried; what they do to models and optimizers."""
