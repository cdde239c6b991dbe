"""Where memory goes, and what would help: what a trace says about the program that was recorded."""
