"""Measuring operators: timing, measured ceilings, records of runs, tables and the report."""
