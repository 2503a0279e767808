"""Files that declare what they do not hold: one sentence, in bounded time and memory."""

import gzip
import io
import os
import random
import struct
import time
import tracemalloc
import warnings
import zipfile

import numpy as np
import pytest

from dist_ens.array_files import read_npy
from dist_ens.errors import UserError
from dist_ens.experiment import DataConfig, describe_source, open_source
from dist_ens.experiment.config_file import ExperimentFile
from dist_ens.experiment.network_files import read_network
from dist_ens.report import read_run
from dist_ens.report.files import pace_before

pytestmark = pytest.mark.quick

MOST_BYTES, MOST_SECS = 32 * 2**20, 5.0
ARRAYS = {
    "train_images": np.arange(48, dtype=np.float32).reshape(12, 4),
    "train_labels": np.arange(12) % 3,
    "test_images": np.arange(20, dtype=np.float32).reshape(5, 4),
    "test_labels": np.arange(5) % 3,
}
TABLE = {
    "data": np.array([[1.0, 10.0], [3.0, 20.0], [5.0, 60.0], [9.0, 40.0]]),
    "index_features": np.array([0]),
    "index_target": np.array(1),
    "train_idx": np.array([[0, 1]]),
    "test_idx": np.array([[2, 3]]),
}


def saved(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def npy(header, body=b"", version=1):
    text = header if isinstance(header, bytes) else header.encode()
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + body


def described(shape="(12, 4)", descr="'<f4'", fortran_order="False"):
    return f"{{'descr': {descr}, 'fortran_order': {fortran_order}, 'shape': {shape}, }}"


HEADERS = {
    "no body": described("(1000000, 10000)"),
    "negative length": described("(-12, -4)"),
    "bool length": described("(True, 48)"),
    "float length": described("(12.0, 4.0)"),
    "list as shape": described("[12, 4]"),
    "number as shape": described("48"),
    "text as shape": described("'ab'"),
    "length of 31 digits": described(f"({10**30},)"),
    "length of 4000 digits": described(f"({'9' * 4000},)"),
    "length of 5000 digits": described(f"({'9' * 5000},)"),
    "65 axes": described(f"({'1, ' * 64} 48)"),
    "lengths that overflow": described(f"({2**40}, {2**40})"),
    "no example, endless examples": described(f"(0, {2**62})"),
    "no axis": described("()"),
    "nested shape": described("((12, 4),)"),
    "objects": described(descr="'|O'"),
    "void": described(descr="'|V4'"),
    "empty void": described(descr="'|V0'"),
    "text": described(descr="'<U1'"),
    "empty text": described(descr="'<U0'"),
    "endless text": described(descr="'<U999999999'"),
    "bytes": described(descr="'|S4'"),
    "complex": described(descr="'<c8'"),
    "dates": described(descr="'<M8[ns]'"),
    "half a date": described(descr="'<M8['"),
    "three byte float": described(descr="'<f3'"),
    "no type": described(descr="''"),
    "None as type": described(descr="None"),
    "number as type": described(descr="4"),
    "structured": described(descr="[('a', '<f4')]"),
    "structured in a text": described(descr="'i4,i4'"),
    "array of arrays": described(descr="'(1000000000,)f4'"),
    "endless type": described(descr="'" + "f" * 9000 + "'"),
    "1 as order": described(fortran_order="1"),
    "None as order": described(fortran_order="None"),
    "no shape": "{'descr': '<f4', 'fortran_order': False}",
    "one key more": described()[:-1] + "'more': 1}",
    "unhashable key": "{[]: 1}",
    "a set": "{1, 2}",
    "a name": "shape",
    "a call": "__import__('os').abort()",
    "an f-string": "f'{1}'",
    "nothing": "",
    "blanks": " " * 500,
    "9,000 brackets": "[" * 9000,
    "9,000 braces": "{" * 9000,
    "9,000 parentheses": "(" * 9000,
    "9,000 signs": "-" * 9000 + "1",
    "9,000 sums": "1+" * 4500 + "1",
    "9,000 quotes": "'" * 9000,
    "9,000 dots": "a" + ".a" * 4499,
    "null bytes": b"\0" * 100,
    "no text": bytes(range(128, 256)),
    "broken escape": "'\\N{no such}'",
    "line ends": "\n" * 200,
    "20,000 bytes": described() + " " * 20_000,
}
BODY = ARRAYS["train_images"].tobytes()
MEMBERS = {
    **{f"header: {name}": npy(text, BODY) for name, text in HEADERS.items()},
    **{f"header 2.0: {name}": npy(HEADERS[name], BODY, 2) for name in list(HEADERS)[::4]},
    "one byte less": npy(described(), BODY[:-1]),
    "one byte more": npy(described(), BODY + b"\0"),
    "no byte": npy(described()),
    "empty": b"",
    "the magic alone": b"\x93NUMPY",
    "the version alone": b"\x93NUMPY\x01\x00",
    "half a length": b"\x93NUMPY\x01\x00\x05",
    "a length alone": b"\x93NUMPY\x01\x00\xff\xff",
    "a header of 4 GB": b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + BODY,
    "version 0": npy(described(), BODY, 2).replace(b"NUMPY\x02", b"NUMPY\x00"),
    "version 4": npy(described(), BODY, 2).replace(b"NUMPY\x02", b"NUMPY\x04"),
    "a pickle": b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00K\x01.",
}


def packed(members, compression=zipfile.ZIP_STORED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def archive_with(images=None, arrays=ARRAYS, compression=zipfile.ZIP_STORED):
    """An .npz file, as bytes, whose first member has other content."""
    members = {f"{name}.npy": saved(array) for name, array in arrays.items()}
    if images is not None:
        members[next(iter(members))] = images
    return packed(members, compression)


def in_entry(content, offset, form, *values):
    """An archive whose first entry, in the directory at its end, says something else."""
    at = content.index(b"PK\x01\x02") + offset
    new = struct.pack(form, *values)
    return content[:at] + new + content[at + len(new) :]


def with_name_twice(name):
    file = io.BytesIO(archive_with())
    with zipfile.ZipFile(file, "a") as archive, warnings.catch_warnings(action="ignore"):
        archive.writestr(name, saved(ARRAYS["train_images"]))
    return file.getvalue()


def bomb(compression):
    """An archive in which 64 MiB of labels lie in some 64 KiB or fewer."""
    zeros = npy(described("(67108864,)", "'|u1'"), bytes(2**26))
    members = {f"{name}.npy": saved(array) for name, array in ARRAYS.items()}
    return packed(members | {"train_labels.npy": zeros}, compression)


def made_up(compression):
    """An archive whose directory agrees with a header on 16 MB of images that are not there."""
    images = npy(described("(1000000, 4)"), BODY)
    arrays = ARRAYS | {"train_labels": np.zeros(10**6, np.uint8)}
    declared = len(images) - len(BODY) + 16 * 10**6
    return in_entry(archive_with(images, arrays, compression), 24, "<I", declared)


PLAIN, DEFLATED = archive_with(), archive_with(compression=zipfile.ZIP_DEFLATED)
END = PLAIN.index(b"PK\x05\x06")
ARCHIVES = {
    **{name: archive_with(content) for name, content in MEMBERS.items()},
    "encrypted": in_entry(PLAIN, 8, "<H", 1),
    **{f"method {n}": in_entry(PLAIN, 10, "<H", n) for n in (1, 6, 9, 12, 14, 93, 95, 99)},
    "packed by bzip2": archive_with(compression=zipfile.ZIP_BZIP2),
    "packed by lzma": archive_with(compression=zipfile.ZIP_LZMA),
    "method 8 that is 0": in_entry(PLAIN, 10, "<H", 8),
    "4 GB in a few bytes": in_entry(PLAIN, 24, "<I", 2**32 - 2),
    "4 GB in 4 GB": in_entry(PLAIN, 20, "<II", 2**32 - 2, 2**32 - 2),
    "deflated 4 GB": in_entry(DEFLATED, 24, "<I", 2**32 - 2),
    "16 MB that are made up": made_up(zipfile.ZIP_STORED),
    "16 MB that are made up, deflated": made_up(zipfile.ZIP_DEFLATED),
    "fewer bytes than there are": in_entry(PLAIN, 24, "<I", 10),
    "begins behind the end": in_entry(PLAIN, 42, "<I", 2**32 - 2),
    "begins in another": in_entry(PLAIN, 42, "<I", 30),
    "needs version 9.9": in_entry(PLAIN, 6, "<H", 99),
    "zip64 of nothing": in_entry(PLAIN, 20, "<II", 2**32 - 1, 2**32 - 1),
    "a name beyond the end": in_entry(PLAIN, 28, "<H", 65535),
    "a directory beyond the end": PLAIN[: END + 12] + b"\xff" * 8 + PLAIN[END + 20 :],
    "an end within a comment": PLAIN[:-2] + struct.pack("<H", 22) + PLAIN[END : END + 22],
    "two ends": PLAIN + PLAIN[END:],
    "a locator of zip64": PLAIN[:END] + b"PK\x06\x07" + b"\xff" * 16 + PLAIN[END:],
    "no members": packed({}),
    "other members": packed({"a.npy": saved(np.zeros(3))}),
    "folders": packed({f"{name}.npy/": b"" for name in ARRAYS}),
    "members of a folder": packed({f"x/{name}.npy": saved(a) for name, a in ARRAYS.items()}),
    "a name twice": with_name_twice("train_images.npy"),
    "a name with and without ending": with_name_twice("train_images"),
    "too many labels": bomb(zipfile.ZIP_DEFLATED),
    "too many labels, by bzip2": bomb(zipfile.ZIP_BZIP2),
    "only an .npy file": saved(ARRAYS["train_images"]),
    "empty": b"",
    "a text": b"# text",
    "an endless comment": b"PK\x05\x06" + b"\0" * 16 + b"\xff\xff",
    "64-bit labels as floats": archive_with(arrays=ARRAYS | {"train_labels": np.zeros(12)}),
    "labels of two axes": archive_with(arrays=ARRAYS | {"test_labels": np.zeros((5, 2), int)}),
    "fewer labels": archive_with(arrays=ARRAYS | {"test_labels": np.zeros(4, int)}),
    "tests of another shape": archive_with(arrays=ARRAYS | {"test_images": np.zeros((5, 3))}),
    "tests of another type": archive_with(arrays=ARRAYS | {"test_images": np.zeros((5, 4), "i4")}),
    "no tests": archive_with(arrays=ARRAYS | {"test_images": np.zeros((0, 4), "f4")}),
    **{f"cut at {n} of 20": PLAIN[: len(PLAIN) * n // 20] for n in range(1, 20)},
}
BODIES = {
    "a wrong sum": PLAIN.replace(BODY, BODY[:-1] + b"\x55"),
    "damaged deflate": DEFLATED[:60] + b"\xff" * 40 + DEFLATED[100:],
    "bools that are none": archive_with(
        npy(described(descr="'|b1'"), b"\2" * 48),
        ARRAYS | {"test_images": np.zeros((5, 4), bool)},
    ),
}


def idx(shape, body=b"", kind=8, axes=None):
    lengths = struct.pack(f">{len(shape)}I", *shape)
    return bytes([0, 0, kind, len(shape) if axes is None else axes]) + lengths + body


IDX_FILES = {
    "65536 to the fourth": idx([65536] * 4),
    "255 axes": idx([1] * 255, b"\0"),
    "255 endless axes": idx([2**32 - 1] * 255),
    "65 axes": idx([12] + [1] * 64, bytes(12)),
    "no axes": idx([]),
    "too few lengths": idx([12, 2], axes=3),
    "floats": idx([12, 2, 2], bytes(192), kind=13),
    "no header": b"\0\0",
    "empty": b"",
    "one byte less": idx([12, 2, 2], bytes(47)),
    "one byte more": idx([12, 2, 2], bytes(49)),
    "no body": idx([60_000, 28, 28]),
    "fewer images": idx([11, 2, 2], bytes(44)),
    "no images": idx([0, 2, 2]),
    "another shape": idx([12, 2, 3], bytes(72)),
    "a text": b"# text, and more of it",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of every kind that are in order, and a few that are not files."""
    path = tmp_path_factory.mktemp("hostile")
    for part, count in (("train", 12), ("t10k", 5)):
        images, labels = (
            idx([count, 2, 2], bytes(4 * count)),
            idx([count], bytes([0, 1, 2] * 5)[:count]),
        )
        (path / f"{part}-images-idx3-ubyte").write_bytes(images)
        (path / f"{part}-labels-idx1-ubyte").write_bytes(labels)
    (path / "plain.npz").write_bytes(PLAIN)
    (path / "folder").mkdir()
    os.mkfifo(path / "pipe")
    (path / "zero").symlink_to("/dev/zero")
    (path / "loop").symlink_to(path / "loop")
    (path / "nowhere").symlink_to(path / "absent")
    return path


def refusal(read, *arguments):
    """What a reader says to something; None if it takes it."""
    tracemalloc.start()
    begun = time.monotonic()
    try:
        read(*arguments)
    except UserError as error:
        message = str(error)
    else:
        message = None
    took, (_, peak) = time.monotonic() - begun, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert took < MOST_SECS
    assert peak < MOST_BYTES
    assert message is None or 40 < len(message) < 1500
    return message


def test_the_corpus_is_large():
    assert len(ARCHIVES) + len(BODIES) + len(IDX_FILES) >= 160


def test_the_files_that_are_changed_are_in_order(folder):
    for name in (f"npz:{folder / 'plain.npz'}", f"idx:{folder}"):
        source = open_source(DataConfig(source=name))
        assert describe_source(DataConfig(source=name)) == (source.spec, 12)


@pytest.mark.parametrize("name", ARCHIVES)
def test_what_the_headers_of_an_archive_say_is_refused_by_both_doors(folder, name):
    (folder / "x.npz").write_bytes(ARCHIVES[name])
    config = DataConfig(source=f"npz:{folder / 'x.npz'}", num_classes=3)
    opened, told = (refusal(read, config) for read in (open_source, describe_source))
    assert opened is not None
    assert told == opened


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("encrypted", "train_images is encrypted. Save it again with numpy.savez."),
        (
            "method 99",
            "train_images is compressed by zip method 99, and NumPy uses methods 0 and 8.",
        ),
        (
            "header: no body",
            "float32[1000000, 10000], 40,000,000,000 bytes, and the file holds 192",
        ),
        ("header: objects", "holds Python objects, as NumPy makes of rows of unequal length"),
        ("too many labels", "has 12 inputs and labels of shape [67108864]"),
    ],
)
def test_a_refusal_names_what_is_wrong_and_what_to_do(folder, name, sentence):
    (folder / "x.npz").write_bytes(ARCHIVES[name])
    assert sentence in refusal(open_source, DataConfig(source=f"npz:{folder / 'x.npz'}"))


@pytest.mark.parametrize("name", BODIES)
def test_damaged_values_of_an_archive_are_refused_when_they_are_read(folder, name):
    (folder / "x.npz").write_bytes(BODIES[name])
    config = DataConfig(source=f"npz:{folder / 'x.npz'}")
    assert refusal(open_source, config) is not None


@pytest.mark.slow
@pytest.mark.parametrize("content", [PLAIN, DEFLATED], ids=["stored", "deflated"])
def test_flipped_bytes_give_an_answer_or_a_refusal(folder, content):
    generator = random.Random(0)
    config = DataConfig(source=f"npz:{folder / 'x.npz'}")
    refused = 0
    for _ in range(150):
        flipped = bytearray(content)
        for _ in range(3):
            flipped[generator.randrange(len(content))] = generator.randrange(256)
        (folder / "x.npz").write_bytes(flipped)
        told = refusal(describe_source, config)
        opened = refusal(open_source, config)
        assert told is None or opened is not None
        refused += opened is not None
    assert refused > 50


@pytest.mark.parametrize("packs", [False, True], ids=["plain", "gzipped"])
@pytest.mark.parametrize("name", IDX_FILES)
def test_what_the_header_of_an_idx_file_says_is_refused_by_both_doors(
    tmp_path, folder, name, packs
):
    for file in folder.glob("*-ubyte"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    content = IDX_FILES[name]
    images = tmp_path / f"train-images-idx3-ubyte{'.gz' if packs else ''}"
    images.write_bytes(gzip.compress(content) if packs else content)
    opened, told = (
        refusal(read, DataConfig(source=f"idx:{tmp_path}"))
        for read in (open_source, describe_source)
    )
    assert opened is not None
    # How much is packed in a gzip file is known when it is unpacked, and bounded before that.
    assert told == opened or (packs and "one byte" in name)


def test_a_packed_idx_file_is_unpacked_as_far_as_its_header_says(tmp_path, folder):
    for file in folder.glob("*-ubyte"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with gzip.open(tmp_path / "train-images-idx3-ubyte.gz", "wb") as file:
        file.write(idx([12, 2, 2]) + bytes(2**26))
    assert "holds more" in refusal(open_source, DataConfig(source=f"idx:{tmp_path}"))


@pytest.mark.parametrize("name", MEMBERS)
def test_an_npy_file_is_refused_as_its_headers_are_in_an_archive(tmp_path, name):
    (tmp_path / "x.npy").write_bytes(MEMBERS[name])
    assert refusal(read_npy, tmp_path / "x.npy", "--input") is not None
    (tmp_path / "curves.json").write_text("{}")
    (tmp_path / "pictures.npy").write_bytes(MEMBERS[name])
    told = refusal(read_run, tmp_path)
    assert told is not None
    assert "dist-ens evaluate" in told


@pytest.mark.parametrize("array", [np.array(3), np.zeros(4), np.zeros((2, 0, 3))])
def test_pictures_that_are_none_are_refused(tmp_path, array):
    (tmp_path / "curves.json").write_text("{}")
    np.save(tmp_path / "pictures.npy", array)
    assert "not pictures" in refusal(read_run, tmp_path)


@pytest.mark.parametrize("name", ["curves.json", "summary.json", "metrics.jsonl", "pictures.npy"])
@pytest.mark.parametrize("place", ["pipe", "zero"])
def test_a_pipe_or_a_device_in_the_folder_of_a_run_is_refused(tmp_path, folder, name, place):
    (tmp_path / "curves.json").write_text("{}")
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to(folder / place)
    assert "it is not a regular file" in refusal(read_run, tmp_path)


def test_a_pipe_or_a_device_is_no_file_of_a_run_for_other_readers_either(tmp_path, folder):
    for place in ("pipe", "zero"):
        assert "regular file" in refusal(ExperimentFile, str(folder / place))
        network = tmp_path / f"{place}.safetensors"
        network.symlink_to(folder / place)
        assert "regular file" in refusal(read_network, network)
        (tmp_path / "summary.json").unlink(missing_ok=True)
        (tmp_path / "summary.json").symlink_to(folder / place)
        assert pace_before(tmp_path, 3) == {}


@pytest.mark.parametrize("kind", ["npz", "idx", "text", "uci"])
@pytest.mark.parametrize(
    "place",
    ["folder", "pipe", "zero", "loop", "nowhere", "absent", "~nosuchuser/x", "a" * 300, "a\0b"],
)
def test_a_path_that_is_no_file_is_refused(folder, kind, place):
    place = place if place.startswith("~") else folder / place
    config = DataConfig(source=f"{kind}:{place}")
    opened, told = (refusal(read, config) for read in (open_source, describe_source))
    assert opened is not None
    assert told == opened


@pytest.mark.parametrize("place", ["folder", "pipe", "zero", "loop", "absent"])
def test_an_idx_file_that_is_no_file_is_refused(tmp_path, folder, place):
    (tmp_path / "train-images-idx3-ubyte").symlink_to(folder / place)
    assert refusal(open_source, DataConfig(source=f"idx:{tmp_path}")) is not None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        gzip.compress(b"a" * 999, mtime=0)[:20],
        b"no gzip",
        gzip.compress(b"a" * 9, mtime=0),
    ],
)
def test_a_packed_text_that_cannot_be_used_is_refused(tmp_path, content):
    (tmp_path / "t.txt.gz").write_bytes(content)
    assert refusal(open_source, DataConfig(source=f"text:{tmp_path / 't.txt.gz'}")) is not None


@pytest.mark.parametrize("name", MEMBERS)
def test_a_table_with_a_hostile_array_is_refused(tmp_path, name):
    (tmp_path / "t.npz").write_bytes(archive_with(MEMBERS[name], TABLE))
    assert refusal(open_source, DataConfig(source=f"uci:{tmp_path / 't.npz'}")) is not None


def test_more_than_the_memory_that_is_free_is_refused(tmp_path):
    # Sparse files of 4 TiB: they take no room on the disk.
    with (tmp_path / "x.npy").open("wb") as file:
        file.write(npy(described(f"({2**42},)", "'|u1'")))
        file.truncate(file.tell() + 2**42)
    assert "needs 4,398,046,511,104 bytes" in refusal(read_npy, tmp_path / "x.npy", "--input")
    with (tmp_path / "t.txt").open("wb") as file:
        file.truncate(2**42)
    told = refusal(open_source, DataConfig(source=f"text:{tmp_path / 't.txt'}"))
    assert "memory is free" in told
    for part in ("train", "t10k"):
        with (tmp_path / f"{part}-images-idx3-ubyte").open("wb") as file:
            file.write(idx([12, 2**19, 2**19]))
            file.truncate(file.tell() + 12 * 2**38)
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx([12], bytes([0, 1, 2] * 4)))
    assert "bytes of memory" in refusal(open_source, DataConfig(source=f"idx:{tmp_path}"))
