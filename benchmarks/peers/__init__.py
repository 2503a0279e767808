"""dist_ens and its peers side by side: the same ensembles, trained in the ways people write.

A way is a class, made from a workload; its `run(num_steps)` returns when every member has taken as
many steps more. What a way cannot do it says with `Absent`.
"""
