"""Sources of jobs: models of transformers, modules and scripts."""
