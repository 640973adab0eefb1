"""Experts modules of live transformers models: what they compute, where their weights are, and how they are served.

`activation` recognizes the function between the matmuls, `layouts` maps parameters to canonical weights and back,
`serving` holds a module's kernels, `training` trains what it can in place, `own` lets transformers' code train the
rest, `calls` has the function that transformers calls, `blocks` finds a model's experts and patches those without the
interface, `memory` counts and frees a model's memory, and `meta` builds a model from its config.
"""
