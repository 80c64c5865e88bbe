"""Benches of whole models, beside the package: ``warploom bench --spec benchmarks/transformer.py``.

Each file is a spec, but those whose names begin with an underscore: they are parts of the others.
"""
