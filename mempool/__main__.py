"""``python -m mempool`` is the command ``mempool``."""

from mempool.cli import main

if __name__ == "__main__":
    main()
