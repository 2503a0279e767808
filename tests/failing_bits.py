"""A process in which member 3 fails, to compare the bits of the other members.

    python tests/failing_bits.py '[["skip", "vmap", "adam", 2, 1, 4]]'

Each case is a policy, an execution, an optimizer, the rows and the columns of the mesh, and the
number of steps per call. The process prints the cases in which another member has other bits than
in a run without the failure. It compiles as a user's process does, which the tests do not.
"""

import json
import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

from failing import FAILING, OTHERS, ensemble, members_equal, trained


def differs(policy, execution, optimizer, rows, columns, steps_per_call):
    made = ensemble(policy, execution, optimizer=optimizer, rows=rows, columns=columns, width=8192)
    with_fault, without = (
        trained(made, fails_at, steps=12, steps_per_call=steps_per_call)
        for fails_at in ([5, 7], [])
    )
    assert members_equal(with_fault.state, without.state, [FAILING]) is False
    return not members_equal(with_fault.state, without.state, OTHERS)


if __name__ == "__main__":
    print(json.dumps([case for case in json.loads(sys.argv[1]) if differs(*case)]))
