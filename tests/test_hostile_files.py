"""Files that are damaged or no files at all: one sentence, in bounded time and memory."""

import gzip
import io
import os
import struct
import time
import tracemalloc
import zipfile

import numpy as np
import pytest

from dist_ens.experiment import DataConfig, open_source
from dist_ens.experiment.config_file import stored_experiment
from dist_ens.experiment.networks import read_network
from dist_ens.ground.errors import UserError
from dist_ens.ground.file_reading import read_npy

pytestmark = pytest.mark.quick
MOST_BYTES, MOST_SECS = 64 * 2**20, 5.0
ARRAYS = {
    "train_images": np.arange(48, dtype=np.float32).reshape(12, 4),
    "train_labels": np.arange(12) % 3,
    "test_images": np.arange(20, dtype=np.float32).reshape(5, 4),
    "test_labels": np.arange(5) % 3,
}
BODY = ARRAYS["train_images"].tobytes()


def saved(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def npy(shape, descr="<f4", body=BODY):
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + body


NPY = {
    "more declared than there is": npy((1000, 10_000)),
    "65 axes": npy((1,) * 64 + (48,)),
    "a negative length": npy((-12, -4)),
    "objects": saved(np.array([{}, {}])),
    "a pickle": b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00K\x01.",
    "a call": npy("__import__('os').abort()"),
    "cut off": npy((12, 4))[:-1],
    "half a header": npy((12, 4))[:30],
    "empty": b"",
}


def archive(images=None, compression=zipfile.ZIP_STORED):
    """An .npz file, as bytes, whose first member may have other content."""
    members = {f"{name}.npy": saved(array) for name, array in ARRAYS.items()}
    members["train_images.npy"] = images or members["train_images.npy"]
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as packed:
        for name, content in members.items():
            packed.writestr(name, content)
    return file.getvalue()


def in_entry(content, offset, form, *values):
    """An archive whose first entry, in the directory at its end, says something else."""
    at = content.index(b"PK\x01\x02") + offset
    new = struct.pack(form, *values)
    return content[:at] + new + content[at + len(new) :]


PLAIN, DEFLATED = archive(), archive(compression=zipfile.ZIP_DEFLATED)
ARCHIVES = {
    **{name: archive(NPY[name]) for name in NPY if name not in ("empty", "a pickle")},
    "encrypted": in_entry(PLAIN, 8, "<H", 1),
    "method 99": in_entry(PLAIN, 10, "<H", 99),
    "begins behind the end": in_entry(PLAIN, 42, "<I", 2**32 - 2),
    "a wrong sum": PLAIN.replace(BODY, BODY[:-1] + b"\x55"),
    "damaged deflate": DEFLATED[:60] + b"\xff" * 40 + DEFLATED[100:],
    "only an .npy file": saved(ARRAYS["train_images"]),
    "empty": b"",
    "a text": b"# text",
    **{f"cut at {n} of 4": PLAIN[: len(PLAIN) * n // 4] for n in (1, 2, 3)},
}


def idx(shape, body=b"", kind=8):
    return bytes([0, 0, kind, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + body


IDX = {
    "65536 to the fourth": idx([65536] * 4),
    "255 endless axes": idx([2**32 - 1] * 255),
    "no axes": idx([]),
    "floats": idx([12, 2, 2], bytes(192), kind=13),
    "one byte less": idx([12, 2, 2], bytes(47)),
    "no body": idx([60_000, 28, 28]),
    "fewer images": idx([11, 2, 2], bytes(44)),
    "a text": b"# text, and more of it",
    "empty": b"",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of every kind that are in order, and a few that are no files."""
    path = tmp_path_factory.mktemp("hostile")
    for part, count in (("train", 12), ("t10k", 5)):
        labels = idx([count], bytes([0, 1, 2] * 5)[:count])
        (path / f"{part}-images-idx3-ubyte").write_bytes(idx([count, 2, 2], bytes(4 * count)))
        (path / f"{part}-labels-idx1-ubyte").write_bytes(labels)
    (path / "plain.npz").write_bytes(PLAIN)
    (path / "folder").mkdir()
    os.mkfifo(path / "pipe")
    (path / "zero").symlink_to("/dev/zero")
    (path / "loop").symlink_to(path / "loop")
    return path


def refusal(read, *arguments):
    """What a reader says, in bounded time and memory, to something that it refuses."""
    tracemalloc.start()
    begun = time.monotonic()
    with pytest.raises(UserError) as refused:
        read(*arguments)
    took, (_, peak) = time.monotonic() - begun, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert took < MOST_SECS
    assert peak < MOST_BYTES
    assert 40 < len(str(refused.value)) < 1500
    return str(refused.value)


def test_the_files_that_are_changed_are_in_order(folder, tmp_path):
    for name in (f"npz:{folder / 'plain.npz'}", f"idx:{folder}"):
        assert open_source(DataConfig(source=name)).num_train_examples == 12
    (tmp_path / "x.npy").write_bytes(npy((12, 4)))
    np.testing.assert_array_equal(read_npy(tmp_path / "x.npy", "x"), ARRAYS["train_images"])


@pytest.mark.parametrize("name", NPY)
def test_a_damaged_array_is_refused(tmp_path, name):
    (tmp_path / "x.npy").write_bytes(NPY[name])
    assert refusal(read_npy, tmp_path / "x.npy", "--input").startswith("--input cannot be read: ")


@pytest.mark.parametrize("name", ARCHIVES)
def test_a_damaged_archive_is_refused(tmp_path, name):
    (tmp_path / "x.npz").write_bytes(ARCHIVES[name])
    assert "x.npz" in refusal(open_source, DataConfig(source=f"npz:{tmp_path / 'x.npz'}"))
    assert "x.npz" in refusal(read_network, tmp_path / "x.npz")


@pytest.mark.parametrize("packs", [False, True], ids=["plain", "gzipped"])
@pytest.mark.parametrize("name", IDX)
def test_a_damaged_idx_file_is_refused(tmp_path, folder, name, packs):
    for file in folder.glob("*-ubyte"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    images = tmp_path / f"train-images-idx3-ubyte{'.gz' if packs else ''}"
    images.write_bytes(gzip.compress(IDX[name]) if packs else IDX[name])
    refusal(open_source, DataConfig(source=f"idx:{tmp_path}"))


@pytest.mark.parametrize("kind", ["npz", "idx", "text", "uci"])
@pytest.mark.parametrize("place", ["folder", "pipe", "zero", "loop", "absent", "a" * 300])
def test_a_path_that_is_no_file_is_refused(folder, kind, place):
    refusal(open_source, DataConfig(source=f"{kind}:{folder / place}"))


@pytest.mark.parametrize("place", ["pipe", "zero"])
def test_a_pipe_or_a_device_is_never_read(tmp_path, folder, place):
    assert "regular file" in refusal(read_npy, folder / place, "--input")
    assert "regular file" in refusal(stored_experiment, str(folder / place))
    network = tmp_path / f"{place}.safetensors"
    network.symlink_to(folder / place)
    assert "regular file" in refusal(read_network, network)
