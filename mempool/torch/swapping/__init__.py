"""Swapping while a program runs."""
