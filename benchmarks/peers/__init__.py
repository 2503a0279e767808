"""Comparison of dist_ens with other ways to train the same ensembles.

A way is a class that is made from a workload. Its `run(num_steps)` returns when every member has
taken that many more steps. A way that does not support a workload raises `Absent`.
"""
