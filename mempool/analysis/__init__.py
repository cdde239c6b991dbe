"""Analysis of a recorded trace: where the program's memory goes, and which remedies would save memory."""
