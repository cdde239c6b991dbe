"""Where a model to be tried comes from: transformers, modules, scripts; optimizers and losses by name."""
