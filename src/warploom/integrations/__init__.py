"""Where models meet warploom: one line for a library that people use already."""
