"""``mempool rehearse``: run a CUDA program without a GPU."""
