"""A process in which member 3 fails, to compare the bits of the other members.

    python tests/failing_bits.py '[["skip", "vmap", "adam", 2, 1, 4]]'

Each case is a policy, an execution, an optimizer, the rows and the columns of the mesh, and the
number of steps per call. The process prints the cases in which another member has other bits than
in a run without the failure. It compiles as a user's process does, which the tests do not.
"""

import json
import os
import sys

import fast_xla

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = fast_xla.devices(4)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

from dist_ens.layout import BATCHES
from failing import FAILING, OTHERS, Batches, ensemble, members_equal


def state_after(made, fails_at, steps_per_call, steps=12):
    """Returns the state of an ensemble after some steps, of which some fail."""
    batches = list(Batches(fails_at, count=steps))
    state = made.init(batches[0])
    for first in range(0, steps, steps_per_call):
        of_call = batches[first : first + steps_per_call]
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *of_call)
        state, _ = made.update_steps(state, made.layout.put(stacked, BATCHES))
    return state


def differs(policy, execution, optimizer, rows, columns, steps_per_call):
    """Returns whether another member has other bits than in a run without the failure."""
    made = ensemble(policy, execution, optimizer=optimizer, rows=rows, columns=columns, width=8192)
    with_fault, without = (state_after(made, at, steps_per_call) for at in ([5, 7], []))
    assert not members_equal(with_fault, without, [FAILING])
    return not members_equal(with_fault, without, OTHERS)


if __name__ == "__main__":
    print(json.dumps([case for case in json.loads(sys.argv[1]) if differs(*case)]))
