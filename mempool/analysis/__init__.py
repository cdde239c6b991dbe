"""Analysis of a recorded trace: use of memory, and remedies that would save memory."""
