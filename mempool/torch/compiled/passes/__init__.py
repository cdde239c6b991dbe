"""Graph passes that apply a decision: offload, reload and recompute."""
