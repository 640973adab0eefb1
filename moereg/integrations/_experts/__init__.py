"""Experts modules of live transformers models: what they compute, where their weights are, and serving them.

`activation` recognizes the function between the matmuls, `layouts` maps parameters to canonical weights and back,
`serving` holds a module's kernels, `calls` is the function that transformers calls, `blocks` finds the modules of a
model and patches those that have no interface, `memory` counts what a model holds and frees, and `meta` makes a model
of a config alone.
"""
