"""Checkpoints of each format, kept as they were written, which every version reads.

`python tests/test_golden_checkpoints.py` writes one of the present format, for a new format only.
"""

import hashlib
import json
import pathlib
import shutil
import sys

ROOT = pathlib.Path(__file__).parent.parent
GOLDEN = pathlib.Path(__file__).parent / "golden_checkpoints"
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    import conftest  # noqa: F401  # The command has the devices that the tests have.

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

from dist_ens.checkpoint import CheckpointStore  # noqa: E402
from dist_ens.errors import RunError  # noqa: E402
from dist_ens.exit_codes import ExitCode  # noqa: E402
from dist_ens.layout import Layout  # noqa: E402

RECORD = {"member": "MLP", "seed": 7, "rate": 0.1}
FORMATS = ["format_1", "format_2"]


def golden_state(layout):
    """Returns the state that all golden checkpoints hold."""
    return layout.put(
        {
            "w": np.arange(12, dtype=np.float32).reshape(4, 3) / 7,
            "half": jnp.arange(4, dtype=jnp.bfloat16),
            "flag": np.array([True, False, True, False]),
            "step": np.full(4, 3, np.int32),
            "member_id": np.array([5, 1, 8, 2], np.int32),
            "key": np.array(jax.random.key_data(jax.random.split(jax.random.key(1), 4))),
        },
        "members",
    )


def shapes_of(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def copied(name, tmp_path):
    """A copy of a golden checkpoint, as the newest step of a run in a folder."""
    shutil.copytree(GOLDEN / name, tmp_path / "checkpoints" / "3")
    return tmp_path / "checkpoints" / "3"


@pytest.mark.quick
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_of_every_format_is_read_for_ever(tmp_path, name, devices):
    copied(name, tmp_path)
    state = golden_state(Layout.make(4, devices=jax.devices()[:devices]))
    saved = CheckpointStore(tmp_path, read_only=True)
    assert saved.restore_run(3) == RECORD
    assert saved.restore_host_file(3, "position") == b"at 17"
    assert saved.restore_host_file(3, "absent") is None
    restored = saved.restore_state(3, shapes_of(state))
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((state, restored)))


@pytest.mark.quick
def test_an_old_record_without_its_checksum_is_damaged(tmp_path):
    record = copied("format_1", tmp_path) / "run" / "metadata"
    sound = record.read_text()
    start = sound.index(', "crc32"')
    record.write_text(sound[:start] + "}")
    with pytest.raises(RunError, match="3 is damaged: run/metadata has no checksum"):
        CheckpointStore(tmp_path, read_only=True).restore_run(3)
    record.write_text(sound.replace("0.1", "0.2"))
    with pytest.raises(RunError, match="3 is damaged: run/metadata does not match its checksum"):
        CheckpointStore(tmp_path, read_only=True).restore_run(3)


@pytest.mark.quick
def test_a_checkpoint_of_a_newer_format_is_refused_as_such(tmp_path):
    manifest = copied("format_2", tmp_path) / "manifest.json"
    line = manifest.read_bytes().splitlines()[0].replace(b'"format": 2', b'"format": 3')
    seal = json.dumps({"sha256": hashlib.sha256(line).hexdigest()}).encode()
    manifest.write_bytes(line + b"\n" + seal + b"\n")
    with pytest.raises(RunError, match="has the format 3, and this .* up to 2") as refused:
        CheckpointStore(tmp_path, read_only=True).restore_run(3)
    assert refused.value.exit_code != ExitCode.DAMAGED  # So nobody sets it aside.


if __name__ == "__main__":
    workdir = pathlib.Path(sys.argv[1])
    with CheckpointStore(workdir) as store:
        state = golden_state(Layout.make(4, devices=jax.devices()[:2]))
        store.save(3, state, RECORD, host_files={"position": b"at 17"})
