"""Readers and writers of trace files, one module per format."""
