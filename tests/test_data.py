"""Sources, and the pipeline of one host."""

import dataclasses
import gzip
import json
import re
import shutil
import struct
import subprocess
import sys

import numpy as np
import optax
import pytest
from sklearn.datasets import load_digits

from conftest import COMMAND_ENVIRONMENT
from dist_ens.data import (
    ArraySplit,
    Source,
    Spec,
    Standardization,
    calls,
    check_source,
    convert_inputs,
    evaluation_batches,
    source_of_arrays,
    training_batches,
)
from dist_ens.data.tfds import TfdsSplit
from dist_ens.ensemble import Ensemble
from dist_ens.experiment import DataConfig, Experiment, describe_source, open_source
from dist_ens.experiment.train import train
from dist_ens.ground.errors import UserError
from dist_ens.losses import categorical
from dist_ens.members import from_functions
from dist_ens.sampling import Order
from dist_ens.training import fit
from saving import steps_in
from tiny_digits.tiny_digits_dataset_builder import TinyDigits

pytestmark = pytest.mark.quick

IMAGES = np.arange(12 * 4, dtype=np.uint8).reshape(12, 2, 2)
LABELS = np.arange(12) % 3
RAGGED = np.array([[1], [1, 2]], object)


def refused(sentence):
    return pytest.raises(UserError, match=sentence)


def write_idx(path, array):
    header = b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    content = header + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.fixture
def idx_folder(tmp_path):
    write_idx(tmp_path / "train-images-idx3-ubyte.gz", IMAGES)
    write_idx(tmp_path / "train-labels-idx1-ubyte.gz", LABELS)
    write_idx(tmp_path / "t10k-images-idx3-ubyte", IMAGES[:5])
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", LABELS[:5])
    return tmp_path


def saved_npz(folder, train, test):
    """The config of a file of two splits."""
    names = ("train_images", "train_labels", "test_images", "test_labels")
    np.savez(folder / "a.npz", **dict(zip(names, (*train, *test), strict=True)))
    return DataConfig(source=f"npz:{folder / 'a.npz'}")


# Batches of one host


def positions(split, *, shuffle=True, host_rows=range(4), first_step=0, steps_per_call=1):
    """Which examples each step is given: the split's inputs are their own numbers."""
    batches = training_batches(
        split,
        Order(len(split), 4, shuffle),
        seed=0,
        host_rows=np.array(host_rows),
        calls=calls(first_step, 9, steps_per_call),
    )
    return [examples["inputs"] for examples, _ in batches]


NUMBERS = ArraySplit(np.arange(10), np.arange(10))


def test_without_shuffling_the_order_is_the_files():
    stream = np.concatenate(positions(NUMBERS, shuffle=False)).ravel()
    assert stream.tolist() == [i % 10 for i in range(36)]


@pytest.mark.parametrize("first_step", [0, 4, 9])
@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_the_examples_of_a_step_depend_on_the_step_alone(first_step, steps_per_call):
    whole = np.concatenate(positions(NUMBERS))
    of_calls = positions(NUMBERS, first_step=first_step, steps_per_call=steps_per_call)
    assert np.array_equal(np.concatenate([whole[:first_step], *of_calls]), whole)
    # Calls end at multiples of steps_per_call, and at the last step.
    ends = np.cumsum([first_step, *(len(call) for call in of_calls)])[1:]
    assert all(end % steps_per_call == 0 or end == 9 for end in ends)


def test_hosts_together_feed_the_global_batch():
    whole = np.concatenate(positions(NUMBERS))
    parts = [np.concatenate(positions(NUMBERS, host_rows=(i, i + 1))) for i in (0, 2)]
    assert np.array_equal(np.concatenate(parts, axis=1), whole)


@pytest.mark.parametrize("batch_size", [3, 5, 64])
def test_evaluation_sees_every_example_exactly_once_in_batches_of_one_shape(batch_size):
    batches = list(
        evaluation_batches(NUMBERS, global_batch_size=batch_size, host_rows=np.arange(batch_size))
    )
    assert {b["inputs"].shape for b in batches} == {(batch_size,)}
    seen = np.concatenate([b["inputs"][b["mask"]] for b in batches])
    assert seen.tolist() == list(range(10))


# Sources


def test_digits_are_unscaled_and_in_proportion():
    source = open_source(DataConfig())
    assert source.spec == Spec((8, 8), "float32", (), 10)
    assert (len(source.train), len(source.test)) == (1437, 360)
    everything = source.train.take(np.arange(1437))
    assert (everything["inputs"].min(), everything["inputs"].max()) == (0.0, 16.0)
    counts = np.bincount(source.test.take(np.arange(360))["labels"])
    assert counts.min() >= 34
    assert counts.max() <= 38


def test_an_idx_folder_is_read_gzipped_or_not(idx_folder):
    source = open_source(DataConfig(source=f"idx:{idx_folder}"))
    assert source.spec == Spec((2, 2), "uint8", (), 3)
    taken = source.train.take(np.array([3, 1]))
    np.testing.assert_array_equal(taken["inputs"], IMAGES[[3, 1]])
    assert taken["labels"].tolist() == [0, 1]
    assert len(source.test) == 5


def test_a_text_is_cut_into_windows_that_predict_the_next_character(tmp_path):
    (tmp_path / "t.txt").write_text("abcdefghij" * 20)
    source = open_source(DataConfig(source=f"text:{tmp_path / 't.txt'}", context_length=8))
    assert source.spec == Spec((8,), "int32", (8,), 10)
    # 180 characters for training: 179 have a next one, 22 windows of 8; 20 for the test: 2.
    assert (len(source.train), len(source.test)) == (22, 2)
    taken = source.train.take(np.array([1]))
    assert taken["inputs"].tolist() == [[8, 9, 0, 1, 2, 3, 4, 5]]
    assert taken["labels"].tolist() == [[9, 0, 1, 2, 3, 4, 5, 6]]


@pytest.mark.parametrize(
    ("kind", "name", "content", "sentence"),
    [
        ("idx", "train-images-idx3-ubyte.gz", b"no gzip at all", "Not a gzipped file"),
        (
            "idx",
            "train-images-idx3-ubyte.gz",
            gzip.compress(b"x" * 99)[:20],
            "ended before the end",
        ),
        ("idx", "train-images-idx3-ubyte.gz", gzip.compress(b"PNG\0a"), "begins with 50 4e 47 00"),
        ("idx", "t10k-labels-idx1-ubyte", b"\0\0\x08\x01\0\0\0\x05\1\2", "cannot reshape array"),
        ("idx", "t10k-labels-idx1-ubyte", None, "No such file or directory"),
        (
            "npz",
            "a.npz",
            {"train_images": IMAGES},
            "lacks train_labels, test_images, test_labels. It",
        ),
        ("npz", "a.npz", {"x": RAGGED, "y": LABELS}, "Object arrays cannot be loaded"),
        ("npz", "a.npz", b"PK\3\4 torn", "not a zip file"),
        ("npz", "a.npz", None, "No such file"),
        ("text", "a.txt", None, "No such file"),
        (
            "text",
            "a.txt",
            b"short",
            "has 5 characters, a tenth of them for the test split, and each",
        ),
        ("text", "a.txt", b"\xff\xfe\x00", "convert the text to UTF-8"),
        ("text", "a.gz", b"no gzip at all", "Not a gzipped file"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(idx_folder, kind, name, content, sentence):
    path = idx_folder / name
    if content is None:
        path.unlink(missing_ok=True)
    elif isinstance(content, dict):
        np.savez(path, **content)
    else:
        path.write_bytes(content)
    place = idx_folder if kind == "idx" else path
    with refused(re.escape(sentence)) as error:
        open_source(DataConfig(source=f"{kind}:{place}", context_length=8))
    assert name in str(error.value)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("digit", "'digit' is not a data source. Did you mean 'digits'?"),
        ("digits:x", "'digits:x' is not a data source. Choose"),
        ("npz:", "'npz:' is not a data source. Choose"),
    ],
)
def test_a_name_of_no_source_is_refused(source, sentence):
    with refused(re.escape(sentence)):
        open_source(DataConfig(source=source))


def test_a_description_is_that_of_the_opened_source(tfds_folder, tmp_path):
    for config in (
        DataConfig(source="digits"),
        saved_npz(tmp_path, (IMAGES / 7.0, LABELS), (IMAGES / 7.0, LABELS)),
        DataConfig(source="tfds:tiny_digits", data_dir=str(tfds_folder)),
    ):
        source = open_source(config)
        assert describe_source(config) == (source.spec, len(source.train)), config


@pytest.mark.parametrize("validation", [0.01, 0.97])
def test_a_share_that_holds_out_nothing_or_everything_is_refused(idx_folder, validation):
    config = DataConfig(source=f"idx:{idx_folder}", validation=validation)
    for read in (open_source, describe_source):
        with refused(f"^validation={validation} holds out"):
            read(config)


# TensorFlow Datasets


@pytest.fixture(scope="module")
def tfds_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    TinyDigits(data_dir=folder, file_format="array_record").download_and_prepare()
    return folder


def test_a_tfds_data_set_is_read_from_disk(tfds_folder):
    source = open_source(DataConfig(source="tfds:tiny_digits", data_dir=str(tfds_folder)))
    assert source.spec == Spec((8, 8), "uint8", (), 10)
    assert (len(source.train), len(source.test)) == (120, 50)
    batches = evaluation_batches(source.test, global_batch_size=16, host_rows=np.arange(16))
    shown = np.concatenate([b["inputs"][b["mask"]] for b in batches])
    expected = load_digits().images[120:170].astype(np.uint8)
    assert sorted(map(bytes, shown)) == sorted(map(bytes, expected))
    assert positions(source.train, steps_per_call=3)[0].shape == (3, 4, 8, 8)


@pytest.mark.slow
def test_reading_tfds_imports_no_tensorflow(tfds_folder):
    code = (
        "import sys\n"
        "from dist_ens.data.tfds import open_tfds\n"
        f"s = open_tfds('tiny_digits', {str(tfds_folder)!r}, None)\n"
        "print(len(s.train), 'tensorflow' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    printed = subprocess.check_output(command, env=COMMAND_ENVIRONMENT, text=True)
    assert printed.split() == ["120", "False"]


def test_a_tfds_data_set_that_is_not_prepared_is_described_and_names_the_extra(tmp_path):
    config = DataConfig(source="tfds:cifar10", data_dir=str(tmp_path))
    assert describe_source(config) == (Spec((32, 32, 3), "uint8", (), 10), None)
    assert not list(tmp_path.iterdir())
    with refused(r"tfds:cifar10 is not prepared in .*tfds-prepare"):
        open_source(config)


@pytest.mark.parametrize("name", ["no_such_set", "tiny_digits:9.9.9", "tiny_digits/other", "a b"])
def test_a_tfds_name_that_names_nothing_is_refused(tfds_folder, name):
    for read in (open_source, describe_source):
        with refused(f"TFDS cannot open 'tfds:{name}'"):
            read(DataConfig(source=f"tfds:{name}", data_dir=str(tfds_folder)))


class WrongTest(TinyDigits):
    """One label of the test split is no class."""

    name = "wrong_test"

    def _split_generators(self, dl_manager):
        # So many that the label is not among the hundred that a fingerprint is taken of.
        return {"train": self._generate_examples(0, 120), "test": self._generate_examples(120, 420)}

    def _generate_examples(self, start, stop):
        for i, example in super()._generate_examples(start, stop):
            yield i, {**example, "label": 10} if i == 131 else example


@pytest.mark.slow
def test_what_is_wrong_with_a_tfds_test_split_loses_no_step(tmp_path):
    WrongTest(data_dir=tmp_path, file_format="array_record").download_and_prepare()
    data = {"source": "tfds:wrong_test", "data_dir": str(tmp_path)}
    data |= {"num_classes": 10, "global_batch_size": 8}
    network = {"execution": "vmap", "model": {"name": "mlp", "hidden_sizes": ()}}
    experiment = Experiment.from_dict({"num_members": 2, "steps": 6, "data": data} | network)
    for _ in range(2):  # the second goes on from what the first has saved
        with refused(r"wrong_test.*, split test"):
            train(experiment, tmp_path / "run")
        assert steps_in(tmp_path / "run")[-1] == 6


def test_tfds_features_of_64_bits_are_narrowed_or_refused():
    class Records(list):
        def __getitems__(self, indices):
            return [self[index] for index in indices]

    images = np.array([[1, 2], [3, 2**31]])
    records = Records({"image": image, "label": np.uint64(1)} for image in images)
    split = TfdsSplit(records, ("image", "label"), "split test", Spec((2,), "int64", (), 10))
    taken = split.take(np.array([[0]]))
    assert (taken["inputs"].dtype, taken["labels"].dtype) == ("int32", "int32")
    assert (taken["inputs"].tolist(), taken["labels"].tolist()) == ([[[1, 2]]], [[1]])
    with refused(r"split test, image: the value 2147483648 at index \(1, 1\)"):
        split.take(np.arange(2))


@pytest.mark.parametrize(
    ("feature", "field", "value"),
    [("image", "shape", {"dimensions": ["8", "-1"]}), ("label", "dtype", "float32")],
)
def test_tfds_features_that_do_not_fit_are_refused(tmp_path, tfds_folder, feature, field, value):
    # Under another name: of its own TFDS knows the features from its builder's code.
    there = tmp_path / "others" / "1.0.0"
    shutil.copytree(tfds_folder / "tiny_digits" / "1.0.0", there)
    info, features = there / "dataset_info.json", there / "features.json"
    info.write_text(info.read_text().replace("tiny_digits", "others"))
    changed = json.loads(features.read_text())
    changed["featuresDict"]["features"][feature]["tensor"][field] = value
    features.write_text(json.dumps(changed))
    for read in (open_source, describe_source):
        with refused("does not have numbers of one shape as inputs and class numbers as labels"):
            read(DataConfig(source="tfds:others", data_dir=str(tmp_path)))


# Arrays

FLOATS = IMAGES.astype(np.float32)
WITH_NAN = np.where(FLOATS == 5, np.nan, FLOATS)
GOOD, NAMES = (IMAGES, LABELS), LABELS.astype(str)


@pytest.mark.parametrize(
    ("train", "test", "num_classes", "sentence"),
    [
        ((IMAGES, LABELS[:9]), GOOD, None, "12 inputs and labels int64[9]"),
        ((IMAGES, LABELS * 100), GOOD, None, "3 different labels from 0 to 200"),
        (GOOD, (IMAGES, LABELS + 1), None, "the label 3 at index 2, outside [0, 3); 4 in all"),
        ((IMAGES, LABELS * 1.0),) * 2 + (3, "has real targets. Leave num_classes=3 out"),
        ((IMAGES, np.eye(3)[LABELS]), GOOD, None, "labels float64[12, 3]. Give one label for each"),
        ((WITH_NAN, LABELS), (FLOATS, LABELS), None, "NaN, in 1 of 12 examples, the first at"),
        (GOOD, (IMAGES[:0], LABELS[:0]), None, "arrays, split test has no examples"),
        (GOOD, (IMAGES[:, 0], LABELS), None, "uint8[2, 2] and class numbers and test examples of"),
        (GOOD, (IMAGES, LABELS * 1.0), None, "test examples of uint8[2, 2] and real targets"),
        ((IMAGES.astype(str), LABELS), GOOD, None, "the type <U3, which holds no real"),
        ((RAGGED, [0, 1]), GOOD, None, "in rows of equal length"),
        (([[1], [1, 2]], [0, 1]), GOOD, None, "arrays, split train: setting an array element with"),
        ((IMAGES, NAMES), (IMAGES, NAMES), 7, "classes '0', '1', '2'. Leave num_classes=7 out."),
        ((IMAGES, NAMES[:1].repeat(12)), (IMAGES, NAMES), None, "one class: all labels are '0'."),
    ],
)
def test_arrays_that_cannot_be_used_are_refused(train, test, num_classes, sentence):
    with refused(re.escape(sentence)):
        source_of_arrays(train, test, num_classes=num_classes)


WIDE = np.array([[1, 2], [3, 2**31 + 5], [5, 2**40 + 7]] * 4)
FIRST_LABELS = np.where(np.arange(12) == 4, 2**31 + 1, LABELS)


@pytest.mark.parametrize(
    ("inputs", "labels", "sentence"),
    [
        (WIDE, LABELS, "inputs: the value 2147483653 at index (1, 1) does not fit"),
        # 2**31 * 1e36 is 2e45, and float32 ends at 3.4e38. Two values of each four rows of three.
        (WIDE * 1e36, LABELS, "at index (1, 1) does not fit in float32 (8 values do not fit)"),
        (IMAGES, FIRST_LABELS, "labels: the value 2147483649 at index 4 does not fit in int32"),
    ],
)
def test_a_number_beyond_32_bits_is_refused_with_its_index(inputs, labels, sentence):
    with refused(re.escape(sentence)):
        source_of_arrays((inputs, labels), (inputs, labels), num_classes=2**31 - 1)


@pytest.mark.parametrize(
    ("dtype", "held"),
    [("i8", "int32"), ("u8", "uint32"), (">i4", "int32"), (">f8", "float32"), ("g", "float32")],
)
def test_inputs_that_fit_have_the_type_in_which_jax_holds_them(tmp_path, dtype, held):
    inputs = IMAGES.astype(dtype)
    source = open_source(saved_npz(tmp_path, *[(inputs, LABELS)] * 2))
    taken = source.train.take(np.arange(12))["inputs"]
    assert source.spec.input_dtype == Spec((2, 2), dtype, (), 3).input_dtype == held
    assert (taken.dtype, taken.tolist()) == (held, IMAGES.tolist())
    # The array that it was trained on is what it predicts for.
    np.testing.assert_array_equal(convert_inputs(source.spec, inputs, "x.npy"), taken)


def test_python_and_a_file_standardise_by_the_same_function(tmp_path):
    table, targets = np.random.default_rng(0).normal(5, 3, size=(2, 12, 2)), np.arange(12.0)
    splits = [(part, targets) for part in table]
    of_file = open_source(saved_npz(tmp_path, *splits))
    of_arrays = source_of_arrays(*splits, standardize=True)
    assert of_arrays.spec == of_file.spec
    assert of_arrays.fingerprint == of_file.fingerprint
    assert of_arrays.train.labels.mean() == pytest.approx(0, abs=1e-6)
    with refused("arrays: the target is constant in the training rows of split 0"):
        source_of_arrays((table[0], np.full(12, 0.1)), splits[1], standardize=True)
    raw = source_of_arrays(*splits)
    np.testing.assert_array_equal(raw.test.labels, targets.astype(np.float32))


FLOAT = Spec((2,), "float32", (), 3)
TOKENS = Spec((2,), "int32", (2,), 3)
UINT = Spec((2,), "uint8", (), 3)


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        (FLOAT, np.int64),
        (FLOAT, np.float16),
        (UINT, bool),
        (UINT, np.float64),
        (TOKENS, np.uint64),
        (Spec((2,), "bool", (), 3), np.int64),
    ],
)
def test_inputs_are_converted_where_their_values_fit(spec, dtype):
    converted = convert_inputs(spec, np.ones((3, 2), dtype), "x.npy")
    assert converted.dtype == spec.input_dtype
    assert converted.tolist() == [[1, 1]] * 3


@pytest.mark.parametrize(
    ("spec", "inputs", "sentence"),
    [
        (UINT, np.array([[1, 2.5]]), "x.npy: the value 2.5 at index (0, 1) does not fit in uint8"),
        (FLOAT, np.ones((3, 2), complex), "the type complex128, which holds no real numbers"),
        (FLOAT, np.ones(2), "shape [2], and the members take [examples, 2]"),
        (FLOAT, np.float32([[1, np.inf]]), "infinity, in 1 of 1 examples, the first at index (0,"),
        (TOKENS, np.int64([[0, 2], [0, 3]]), "the label 3 at index (1, 1), outside [0, 3)"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(spec, inputs, sentence):
    with refused(re.escape(sentence)):
        convert_inputs(spec, inputs, "x.npy")


# Sources of one's own


def yielding(**parts):
    """A split that yields some parts, `(shape, type)` each."""

    class Yielding:
        in_memory = True

        def __len__(self):
            return 10

        def take(self, indices):
            return {name: np.zeros((len(indices), *shape), t) for name, (shape, t) in parts.items()}

    return Yielding()


PARTS = {"inputs": ((3,), "float32"), "labels": ((), "int32")}
SPEC = Spec((3,), "float32", (), 2)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ({"inputs": np.zeros((3, 2)), "labels": np.zeros(3, int)}, "source is a dict, not a"),
        (yielding(**PARTS, mask=((), "bool")), "A split yields .*'mask'"),
        (yielding(inputs=PARTS["inputs"]), "yields .'inputs'.* describes .*'labels'"),
        (yielding(**PARTS | {"labels": ((), "float32")}), "yields .*float32.* describes .*int32"),
    ],
)
def test_a_source_that_is_none_is_refused(source, told):
    if not isinstance(source, dict):
        source = Source(SPEC, train=yielding(**PARTS), test=source)
    with refused(told):
        check_source(source)


ONE, TWO, POSITIVE = (1.0,), (1.0, 2.0), "a finite, positive deviation for each"
SPLITS = Experiment(steps=1, data=DataConfig(examples="splits"))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Spec((3,), "float32", (), 2, class_names="abc"), "num_classes=2, .* 3 names"),
        (lambda: Standardization((ONE,), (TWO,), ONE, ONE), POSITIVE),
        (lambda: Standardization((ONE,), (ONE,), TWO, TWO), POSITIVE),
        (lambda: Standardization((ONE,), (ONE,), ONE, (0.0,)), POSITIVE),
        (lambda: Standardization((ONE,), (ONE,), (np.nan,), ONE), POSITIVE),
        (lambda: SPLITS.total_members(num_groups=1), "a source with several divisions"),
        (
            lambda: Source(dataclasses.replace(SPEC, num_groups=3), *[yielding(**PARTS)] * 2),
            "train split must have equally many examples of each of 3 groups: it has 10",
        ),
    ],
)
def test_a_description_that_contradicts_itself_is_refused(make, told):
    with refused(told):
        make()


def test_a_split_may_yield_what_numpy_makes_of_numbers():
    wide = yielding(inputs=((3,), "float64"), labels=((), "int64"))
    source = Source(SPEC, train=wide, test=wide)
    check_source(source)
    member = from_functions(lambda key: {"w": np.ones((3, 2))}, lambda p, x: x @ p["w"])
    ensemble = Ensemble(member, optax.sgd(0.1), categorical(2), num_members=1, execution="vmap")
    assert fit(ensemble, source, steps=1, batch_size=8, progress=False).state.step == 1
