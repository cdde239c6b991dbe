"""Fail at once, or wait for ever, before PyTorch is imported."""

import sys
import time

if "how=error" in sys.argv:
    raise ValueError("no\n such file")  # error
while True:
    time.sleep(0.1)  # hang
