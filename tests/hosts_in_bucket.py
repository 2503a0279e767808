"""One of some hosts that save a run in a bucket, and resume it.

python tests/hosts_in_bucket.py COORDINATOR NUM_HOSTS PROCESS_ID RUN
"""

import os
import sys

import numpy as np

import fast_xla


def main(coordinator, num_hosts, process_id, run):
    os.environ["XLA_FLAGS"] = fast_xla.flags(4)
    os.environ["JAX_PLATFORMS"] = "cpu"
    from dist_ens.layout import Layout, to_host
    from dist_ens.processes import cluster
    from saving import begun, shapes_of, snapshot

    cluster.start(coordinator, int(num_hosts), int(process_id))
    values = np.random.default_rng(0).normal(size=(8, 400)).astype(np.float32)
    state = Layout.make(8).put({"w": values}, "members")
    with begun(run) as opened:
        for step in (1, 2, 3):
            mine = {"position": f"host {process_id} at {step}".encode()}
            opened.save(snapshot(step, state, host_files=mine))
    with begun(run) as opened:
        assert opened.saved_step == 3
        assert opened.restore_host_file("position") == f"host {process_id} at 3".encode()
        restored = opened.restore_state(shapes_of(state))
    np.testing.assert_array_equal(to_host(restored["w"]), values)


if __name__ == "__main__":
    main(*sys.argv[1:])
