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
from dist_ens.ground.errors import UserError
from dist_ens.losses import categorical
from dist_ens.members import from_functions
from dist_ens.sampling import Order
from dist_ens.training import fit
from tiny_digits.tiny_digits_dataset_builder import TinyDigits

pytestmark = pytest.mark.quick

IMAGES = np.arange(12 * 4, dtype=np.uint8).reshape(12, 2, 2)
LABELS = np.arange(12) % 3
RAGGED = np.array([[1], [1, 2]], object)


def refused(sentence):
    return pytest.raises(UserError, match=sentence)


@pytest.fixture
def idx_folder(tmp_path):
    for name, array in {
        "train-images-idx3-ubyte.gz": IMAGES,
        "train-labels-idx1-ubyte.gz": LABELS,
        "t10k-images-idx3-ubyte": IMAGES[:5],
        "t10k-labels-idx1-ubyte": LABELS[:5],
    }.items():
        header = b"\0\0\x08" + struct.pack(f">B{array.ndim}I", array.ndim, *array.shape)
        content = header + array.astype(np.uint8).tobytes()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    return tmp_path


def saved_npz(folder, train, test):
    """The config of a file of two splits."""
    names = ("train_images", "train_labels", "test_images", "test_labels")
    np.savez(folder / "a.npz", **dict(zip(names, (*train, *test), strict=True)))
    return DataConfig(source=f"npz:{folder / 'a.npz'}")


def positions(split, *, shuffle=True, host_rows=range(4), first_step=0, steps_per_call=1):
    """Which examples each step is given: the split's inputs are their own numbers."""
    order, asked = Order(len(split), 4, shuffle), calls(first_step, 9, steps_per_call)
    batches = training_batches(split, order, seed=0, host_rows=np.array(host_rows), calls=asked)
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


def scored_inputs(split, batch_size):
    rows = np.arange(batch_size)
    batches = [*evaluation_batches(split, global_batch_size=batch_size, host_rows=rows)]
    assert {len(batch["inputs"]) for batch in batches} == {batch_size}
    return np.concatenate([batch["inputs"][batch["mask"]] for batch in batches])


@pytest.mark.parametrize("batch_size", [3, 5, 64])
def test_evaluation_sees_every_example_exactly_once_in_batches_of_one_shape(batch_size):
    assert scored_inputs(NUMBERS, batch_size).tolist() == list(range(10))


def test_digits_are_unscaled_and_in_proportion():
    source = open_source(DataConfig())
    assert source.spec == Spec((8, 8), "float32", (), 10)
    assert (len(source.train), len(source.test)) == (1437, 360)
    everything = source.train.take(np.arange(1437))
    assert (everything["inputs"].min(), everything["inputs"].max()) == (0.0, 16.0)
    counts = np.bincount(source.test.take(np.arange(360))["labels"])
    assert 34 <= counts.min() <= counts.max() <= 38


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


GZIPPED, TEST_LABELS = "train-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        (GZIPPED, b"no gzip at all", "Not a gzipped file"),
        (GZIPPED, gzip.compress(b"x" * 99, mtime=0)[:20], "ended before the end"),
        (GZIPPED, gzip.compress(b"PNG\0a", mtime=0), "begins with 50 4e 47 00"),
        (TEST_LABELS, b"\0\0\x08\x01\0\0\0\x05\1\2", "cannot reshape array"),
        (TEST_LABELS, None, "No such file or directory"),
        ("a.npz", {"train_images": IMAGES}, "lacks train_labels, test_images, test_labels. It"),
        ("a.npz", {"x": RAGGED, "y": LABELS}, "Object arrays cannot be loaded"),
        ("a.npz", b"PK\3\4 torn", "not a zip file"),
        ("a.npz", None, "No such file"),
        ("a.txt", None, "No such file"),
        ("a.txt", b"short", "has 5 characters, a tenth of them for the test split, and each"),
        ("a.txt", b"\xff\xfe\x00", "convert the text to UTF-8"),
        ("a.gz", b"no gzip at all", "Not a gzipped file"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(idx_folder, name, content, sentence):
    path = idx_folder / name
    if content is None:
        path.unlink(missing_ok=True)
    elif isinstance(content, dict):
        np.savez(path, **content)
    else:
        path.write_bytes(content)
    kind = "idx" if "idx" in name else "npz" if path.suffix == ".npz" else "text"
    place = idx_folder if kind == "idx" else path
    with refused(re.escape(sentence)) as error:
        open_source(DataConfig(source=f"{kind}:{place}", context_length=8))
    assert name in str(error.value)


def test_a_description_is_that_of_the_opened_source(tfds_folder, tmp_path):
    for config in (
        DataConfig(source="digits"),
        saved_npz(tmp_path, (IMAGES / 7.0, LABELS), (IMAGES / 7.0, LABELS)),
        tfds("tiny_digits", tfds_folder),
    ):
        source = open_source(config)
        assert describe_source(config) == (source.spec, len(source.train)), config


def tfds(name, folder):
    return DataConfig(source=f"tfds:{name}", data_dir=str(folder))


@pytest.fixture(scope="module")
def tfds_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    TinyDigits(data_dir=folder, file_format="array_record").download_and_prepare()
    return folder


def test_a_tfds_data_set_is_read_from_disk(tfds_folder):
    source = open_source(tfds("tiny_digits", tfds_folder))
    assert source.spec == Spec((8, 8), "uint8", (), 10)
    assert (len(source.train), len(source.test)) == (120, 50)
    shown = scored_inputs(source.test, 16)
    expected = load_digits().images[120:170].astype(np.uint8)
    assert sorted(map(bytes, shown)) == sorted(map(bytes, expected))
    assert positions(source.train, steps_per_call=3)[0].shape == (3, 4, 8, 8)


@pytest.mark.slow
def test_reading_tfds_imports_no_tensorflow(tfds_folder):
    code = (
        "import sys; from dist_ens.data.tfds import open_tfds\n"
        f"s = open_tfds('tiny_digits', {str(tfds_folder)!r}, None)\n"
        "print(len(s.train), 'tensorflow' in sys.modules)"
    )
    command, how = [sys.executable, "-c", code], {"env": COMMAND_ENVIRONMENT, "text": True}
    printed = subprocess.check_output(command, **how)
    assert printed.split() == ["120", "False"]


def test_a_tfds_data_set_that_is_not_prepared_is_described_and_names_the_extra(tmp_path):
    config = tfds("cifar10", tmp_path)
    assert describe_source(config) == (Spec((32, 32, 3), "uint8", (), 10), None)
    assert not list(tmp_path.iterdir())
    with refused(r"tfds:cifar10 is not prepared in .*tfds-prepare"):
        open_source(config)


NO_TFDS = ["no_such_set", "tiny_digits:9.9.9", "tiny_digits/other", "a b"]


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"source": "digit"}, "'digit' is not a data source. Did you mean 'digits'?"),
        ({"source": "digits:x"}, "'digits:x' is not a data source. Choose"),
        ({"source": "npz:"}, "'npz:' is not a data source. Choose"),
        ({"validation": 1e-4}, "validation=0.0001 holds out"),
        ({"validation": 0.9999}, "validation=0.9999 holds out"),
        *(({"source": f"tfds:{name}"}, f"TFDS cannot open 'tfds:{name}'") for name in NO_TFDS),
    ],
)
def test_a_name_of_no_source_and_a_share_of_nothing_are_refused(tfds_folder, config, sentence):
    if "tfds" in config.get("source", ""):
        config = config | {"data_dir": str(tfds_folder)}
    for read in (open_source, describe_source):
        with refused(re.escape(sentence)):
            read(DataConfig(**config))


def test_tfds_features_of_64_bits_and_labels_of_no_class_are_narrowed_or_refused():
    class Records(list):
        def __getitems__(self, indices):
            return [self[index] for index in indices]

    images = np.array([[1, 2], [3, 2**31]])
    records = Records({"image": image, "label": np.uint64(1)} for image in images)
    records.append({"image": images[0], "label": np.uint64(10)})
    split = TfdsSplit(records, ("image", "label"), "split test", Spec((2,), "int64", (), 10))
    taken = split.take(np.array([[0]]))
    assert (taken["inputs"].dtype, taken["labels"].dtype) == ("int32", "int32")
    assert (taken["inputs"].tolist(), taken["labels"].tolist()) == ([[[1, 2]]], [[1]])
    with refused(r"split test, image: the value 2147483648 at index \(1, 1\)"):
        split.take(np.arange(2))
    with refused(r"split test.* the label 10 at index 0, outside \[0, 10\)"):
        split.take(np.array([2]))


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
            read(tfds("others", tmp_path))


FLOATS = IMAGES.astype(np.float32)
WITH_NAN = np.where(FLOATS == 5, np.nan, FLOATS)
GOOD, NAMES = (IMAGES, LABELS), LABELS.astype(str)
WIDE = np.array([[1, 2], [3, 2**31 + 5], [5, 2**40 + 7]] * 4)
LARGE, HUGE = (WIDE, LABELS), (WIDE * 1e36, LABELS)
FIRST_LABELS = np.where(np.arange(12) == 4, 2**31 + 1, LABELS)


@pytest.mark.parametrize(
    ("train", "test", "sentence"),
    [
        ((IMAGES, LABELS[:9]), GOOD, "12 inputs and labels int64[9]"),
        ((IMAGES, LABELS * 100), GOOD, "3 different labels from 0 to 200"),
        (GOOD, (IMAGES, LABELS + 1), "the label 3 at index 2, outside [0, 3); 4 in all"),
        ((IMAGES, np.eye(3)[LABELS]), GOOD, "labels float64[12, 3]. Give one label for each"),
        ((IMAGES, NAMES), (IMAGES, np.full(12, "3")), "class '3', which training did not see"),
        ((WITH_NAN, LABELS), (FLOATS, LABELS), "NaN, in 1 of 12 examples, the first at"),
        (GOOD, (IMAGES[:0], LABELS[:0]), "arrays, split test has no examples"),
        (GOOD, (IMAGES[:, 0], LABELS), "uint8[2, 2] and class numbers and test examples of"),
        (GOOD, (IMAGES, LABELS * 1.0), "test examples of uint8[2, 2] and real targets"),
        ((IMAGES.astype(str), LABELS), GOOD, "the type <U3, which holds no real"),
        ((RAGGED, [0, 1]), GOOD, "in rows of equal length"),
        (([[1], [1, 2]], [0, 1]), GOOD, "arrays, split train: setting an array element with"),
        ((IMAGES, NAMES[:1].repeat(12)), (IMAGES, NAMES), "one class: all labels are '0'."),
        (LARGE, LARGE, "inputs: the value 2147483653 at index (1, 1) does not fit"),
        # 2**31 * 1e36 is 2e45, and float32 ends at 3.4e38. Two values of each four rows of three.
        (HUGE, HUGE, "at index (1, 1) does not fit in float32 (8 values do not fit)"),
    ],
)
def test_arrays_that_cannot_be_used_are_refused(train, test, sentence):
    with refused(re.escape(sentence)):
        source_of_arrays(train, test)


@pytest.mark.parametrize(
    ("labels", "num_classes", "sentence"),
    [
        (LABELS * 1.0, 3, "has real targets. Leave num_classes=3 out"),
        (NAMES, 7, "classes '0', '1', '2'. Leave num_classes=7 out."),
        (FIRST_LABELS, 2**31 - 1, "the value 2147483649 at index 4 does not fit in int32"),
    ],
)
def test_labels_that_are_not_of_as_many_classes_are_refused(labels, num_classes, sentence):
    with refused(re.escape(sentence)):
        source_of_arrays((IMAGES, labels), (IMAGES, labels), num_classes=num_classes)


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
    with refused(r"arrays: the target is constant in the training rows\. Check"):
        source_of_arrays((table[0], np.full(12, 0.1)), splits[1], standardize=True)
    raw = source_of_arrays(*splits)
    np.testing.assert_array_equal(raw.test.labels, targets.astype(np.float32))


FLOAT = Spec((2,), "float32", (), 3)
TOKENS = Spec((2,), "int32", (2,), 3)
UINT = Spec((2,), "uint8", (), 3)
TRUE_OR_NOT = Spec((2,), "bool", (), 3)


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [(FLOAT, "i8"), (FLOAT, "f2"), (UINT, "?"), (UINT, "f8"), (TOKENS, "u8"), (TRUE_OR_NOT, "i8")],
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


@dataclasses.dataclass
class Yielding:
    """A split that yields some parts, `(shape, type)` each."""

    parts: dict
    in_memory = True

    def __len__(self):
        return 10

    def take(self, indices):
        count = len(indices)
        return {name: np.zeros((count, *shape), t) for name, (shape, t) in self.parts.items()}


PARTS = {"inputs": ((3,), "float32"), "labels": ((), "int32")}
SPEC = Spec((3,), "float32", (), 2)


def source_of(test, train=PARTS, **changes):
    return Source(dataclasses.replace(SPEC, **changes), Yielding(train), Yielding(test))


INPUTS, MASK, REALS = {"inputs": PARTS["inputs"]}, {"mask": ((), bool)}, {"labels": ((), "float32")}
ONE, TWO, POSITIVE = (1.0,), (1.0, 2.0), "a finite, positive deviation for each"
SPLITS = Experiment(steps=1, data=DataConfig(examples="splits"))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: check_source({"inputs": np.zeros((3, 2))}), "source is a dict, not a"),
        (lambda: check_source(source_of(PARTS | MASK)), "A split yields .*'mask'"),
        (lambda: check_source(source_of(INPUTS)), "yields .'inputs'.* describes .*'labels'"),
        (lambda: check_source(source_of(PARTS | REALS)), "yields .*float32.* describes .*int32"),
        (lambda: Spec((3,), "float32", (), 2, class_names="abc"), "num_classes=2, .* 3 names"),
        (lambda: Standardization((ONE,), (TWO,), ONE, ONE), POSITIVE),
        (lambda: Standardization((ONE,), (ONE,), TWO, TWO), POSITIVE),
        (lambda: Standardization((ONE,), (ONE,), ONE, (0.0,)), POSITIVE),
        (lambda: Standardization((ONE,), (ONE,), (np.nan,), ONE), POSITIVE),
        (lambda: SPLITS.total_members(num_groups=1), "a source with several divisions"),
        (lambda: source_of(PARTS, num_groups=3), "equally many examples of each of 3 groups: it"),
    ],
)
def test_a_source_that_is_none_or_contradicts_itself_is_refused(make, told):
    with refused(told):
        make()


def test_a_split_may_yield_what_numpy_makes_of_numbers():
    wide = {"inputs": ((3,), "float64"), "labels": ((), "int64")}
    source = source_of(wide, wide)
    check_source(source)
    member = from_functions(lambda key: {"w": np.ones((3, 2))}, lambda p, x: x @ p["w"])
    ensemble = Ensemble(member, optax.sgd(0.1), categorical(2), num_members=1, execution="vmap")
    assert fit(ensemble, source, steps=1, batch_size=8, progress=False).state.step == 1
