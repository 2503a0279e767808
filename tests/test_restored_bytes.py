"""A restore reads each byte of the arrays once, by TensorStore's own count."""

import json
import sys

import jax
import pytest

from dist_ens.layout import Layout
from saving import save
from test_cluster import finish, free_port, start
from two_readers import MESHES, NUM_BYTES, STATE, read_on


def saved(folder, rows):
    """Saves a state from a mesh, and returns the bytes of all that is not the arrays."""
    layout = Layout.make(64, ensemble_axis=rows, devices=jax.devices()[:rows])
    save(folder, layout.put(STATE, "members"))
    files = (folder / "checkpoints" / "1" / "state").rglob("*")
    return sum(path.stat().st_size for path in files if path.is_file()) - NUM_BYTES


@pytest.mark.parametrize("rows", [1, 8])
def test_a_restore_of_64_members_on_8_devices_reads_each_byte_once(tmp_path, rows):
    index = saved(tmp_path, rows)
    assert index < 0.05 * NUM_BYTES
    for rows, columns, model_axis in [*((*mesh, 1) for mesh in MESHES), (2, 2, 2), (1, 2, 4)]:
        num_bytes = read_on(rows, columns, tmp_path, model_axis)
        assert NUM_BYTES <= num_bytes <= 1.05 * NUM_BYTES + index


def test_each_of_two_hosts_reads_the_members_that_its_devices_hold(tmp_path):
    index = saved(tmp_path, 8)
    logs = [tmp_path / f"host_{i}.log" for i in range(2)]
    script = [sys.executable, "tests/two_readers.py", f"127.0.0.1:{free_port()}"]
    codes = finish([start([*script, str(i), str(tmp_path)], logs[i]) for i in range(2)], logs)
    assert codes == [0, 0], "\n".join(log.read_text() for log in logs)
    read = [json.loads((tmp_path / f"read_{i}.json").read_text()) for i in range(2)]
    for mesh, *by_host in zip(MESHES, *read, strict=True):
        # On an ensemble axis over both hosts, each holds a half. With one row, each holds all.
        of_host = NUM_BYTES / 2 if mesh[0] > 1 else NUM_BYTES
        for num_bytes in by_host:
            assert of_host <= num_bytes <= 1.05 * of_host + index, mesh
