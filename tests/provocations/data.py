"""How the messages of `dist_ens.data` are provoked."""

import importlib.util
import struct
import sys
import types

import numpy as np
import psutil
from dist_ens.config import DataConfig

from dist_ens.data import (
    ArraySplit,
    Source,
    Spec,
    Standardization,
    conversion,
    digits,
    idx,
    open_source,
    source_check,
    source_of_arrays,
    text,
    tfds,
    tree,
)
from provocations._parts import examples, source

_TEXT = Spec((8,), "int32", (8,), 5)


def _source(inputs=None, labels=None):
    """A source of arrays whose training part has other inputs or labels."""
    good = examples()
    train = (good[0] if inputs is None else inputs, good[1] if labels is None else labels)
    return source_of_arrays(train, good, name="the data")


def rows_of_unequal_length():
    class Rows:
        def __array__(self, dtype=None, copy=None):
            raise ValueError("The rows have 2 numbers and 1.")

    _source(inputs=Rows())


def an_iterator_in_place_of_an_array():
    _source(inputs=iter([1.0, 2.0]))


def splits_of_another_shape():
    source_of_arrays(examples(), examples(features=5))


def an_input_that_is_nan():
    inputs, labels = examples()
    inputs[2] = np.nan
    _source(inputs, labels)


def inputs_that_are_text():
    _source(inputs=np.full((8, 4), "cat"))


def labels_that_are_one_hot():
    _source(labels=np.eye(8))


def labels_with_an_axis_too_many():
    _source(labels=np.zeros((8, 1, 1), int))


def no_examples():
    _source(inputs=np.zeros((0, 4)), labels=np.zeros(0, int))


def one_class():
    _source(labels=np.zeros(8, int))


def a_label_outside_the_classes():
    source_of_arrays(examples(), examples(), num_classes=2)


def fewer_labels_than_inputs():
    _source(labels=np.zeros(7, int))


def a_class_without_examples():
    _source(labels=np.array([0, 2] * 4))


def inputs_of_another_shape():
    conversion.convert_inputs(source().spec, np.zeros(4), "--input 'a.npy'")


def a_character_outside_the_vocabulary():
    conversion.convert_inputs(_TEXT, np.full((1, 8), 7), "--input 'a.npy'")


def digits_that_are_not_installed(monkeypatch):
    package = types.SimpleNamespace(origin="/usr/lib/sklearn/__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: package)
    digits.open_digits(None)


def _idx(folder, content):
    (folder / "train-images-idx3-ubyte").write_bytes(content)
    (folder / "train-labels-idx1-ubyte").write_bytes(content)
    idx.describe_idx(str(folder), None)


def a_folder_without_idx_files(tmp_path):
    idx.open_idx(str(tmp_path), None)


def an_idx_folder_that_is_absent(tmp_path):
    idx.open_idx(str(tmp_path / "mnist"), None)


def an_idx_file_that_is_cut_off(tmp_path):
    _idx(tmp_path, b"\0\0\x08\x03" + struct.pack(">3I", 2, 3, 3))


def an_idx_file_of_floats(tmp_path):
    _idx(tmp_path, b"\0\0\x0d\x01" + struct.pack(">I", 2))


def classes_of_a_table():
    open_source(DataConfig(source="uci:a.npz", num_classes=2))


def a_source_that_is_unknown():
    open_source(DataConfig(source="utc:a.npz"))


def a_test_split_that_does_not_divide_over_groups():
    spec = Spec((4,), "float32", (), 3, num_groups=3)
    Source(spec, ArraySplit(*examples(6)), ArraySplit(*examples(8)))


def a_split_that_is_a_list():
    Source(source().spec, [1, 2], ArraySplit(*examples()))


def a_share_that_holds_out_nothing():
    source().with_validation(0.01)


def arrays_in_place_of_a_source():
    source_check.check_source(examples())


def a_description_that_is_a_dict():
    source_check.check_source(
        Source(types.SimpleNamespace(num_groups=1), source().train, source().test)
    )


class _Split:
    """A split of another shape than its description says, or with other parts."""

    in_memory = False

    def __init__(self, *, length=6, features=4, **more):
        self._length, self._features, self._more = length, features, more

    def __len__(self):
        return self._length

    def take(self, indices):
        inputs = np.zeros((len(indices), self._features), np.float32)
        return {"inputs": inputs, "labels": np.zeros(len(indices), np.int32)} | self._more


def _check_split(**changes):
    spec = source().spec
    source_check.check_source(Source(spec, _Split(**changes), source().test))


def a_split_without_examples():
    _check_split(length=0)


def examples_with_weights():
    _check_split(weights=np.ones(1))


def examples_unlike_their_description():
    _check_split(features=5)


def _standardization(input_mean=(0.0, 0.0), input_std=(1.0, 1.0)):
    return Standardization((input_mean,), (input_std,), (0.0,), (1.0,))


def means_of_fewer_features():
    _standardization(input_mean=(0.0,))


def means_of_fewer_groups():
    Spec((2,), "float32", (), None, num_groups=2, standardization=_standardization())


def a_deviation_of_zero():
    _standardization(input_std=(1.0, 0.0))


def inputs_of_dates():
    Spec((4,), "datetime64[s]", (), 3)


def inputs_of_an_unknown_type():
    Spec((4,), "flaot32", (), 3)


def _text(folder, content, context_length=128):
    (folder / "a.txt").write_bytes(content)
    text.open_text(str(folder / "a.txt"), context_length)


def a_text_that_is_too_short(tmp_path):
    _text(tmp_path, b"to be or not to be")


def a_text_that_is_too_long(tmp_path, monkeypatch):
    memory = types.SimpleNamespace(available=160)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    _text(tmp_path, b"to be or not to be")


def a_text_in_latin1(tmp_path):
    _text(tmp_path, "Köln".encode("latin1"))


def _feature(shape=(8, 8), dtype=np.uint8, **more):
    shown = f"Tensor(shape={shape}, dtype={np.dtype(dtype).name})"
    kind = type("Feature", (types.SimpleNamespace,), {"__repr__": lambda self: shown})
    return kind(shape=shape, np_dtype=dtype, **more)


def _tfds(monkeypatch, read=list, *, is_prepared=True, file_format="array_record", **changes):
    """Opens a data set of TFDS that has something else than digits."""
    label = _feature((), np.int64, num_classes=10)
    info = {
        "features": {"image": _feature(), "label": label},
        "splits": {"train": 6, "test": 6},
        "supervised_keys": ("image", "label"),
        "file_format": types.SimpleNamespace(value=file_format),
    }
    builder = types.SimpleNamespace(
        info=types.SimpleNamespace(**info | changes),
        data_dir="/data/digits/1.0.0",
        is_prepared=lambda: is_prepared,
        as_data_source=lambda split: read(),
    )
    core = types.SimpleNamespace(DatasetNotFoundError=KeyError)
    library = types.SimpleNamespace(builder=lambda *_, **__: builder, core=core)
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", library)
    return library


def a_tfds_name_that_is_unknown(monkeypatch):
    def unknown(*_, **__):
        raise ValueError("Dataset digit not found.")

    _tfds(monkeypatch).builder = unknown
    tfds.open_tfds("digit", None, None)


def tfds_that_is_not_prepared(monkeypatch):
    _tfds(monkeypatch, is_prepared=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    tfds.open_tfds("digits", None, None)


def tfds_in_another_file_format(monkeypatch):
    _tfds(monkeypatch, file_format="tfrecord")
    tfds.open_tfds("digits", None, None)


class _Damaged:
    def __getitems__(self, indices):
        raise ValueError("the record at 3 is damaged")

    def __len__(self):
        return 6


def tfds_that_is_damaged(monkeypatch):
    _tfds(monkeypatch, read=_Damaged)
    tfds.open_tfds("digits", None, 10).train.take(np.zeros(1, int))


class _CutOff(_Damaged):
    def __getitems__(self, indices):
        return [{"image": None, "label": None} for _ in indices]


def tfds_that_is_cut_off(monkeypatch):
    _tfds(monkeypatch, read=_CutOff)
    tfds.open_tfds("digits", None, 10).train.take(np.full(1, 4))


def tfds_with_labels_that_are_text(monkeypatch):
    _tfds(monkeypatch, features={"image": _feature(), "label": _feature((), "U3")})
    tfds.open_tfds("digits", None, None)


def tfds_with_one_feature(monkeypatch):
    _tfds(monkeypatch, features={"image": _feature()})
    tfds.open_tfds("digits", None, None)


def tfds_that_states_no_classes(monkeypatch):
    features = {"image": _feature(), "label": _feature((), np.int64)}
    _tfds(monkeypatch, is_prepared=False, features=features)
    tfds.describe_tfds("digits", None, None)


def tfds_without_a_test_split(monkeypatch):
    _tfds(monkeypatch, splits={"train": 6})
    tfds.open_tfds("digits", None, None)


def tfds_with_an_empty_split(monkeypatch):
    _tfds(monkeypatch)
    tfds.open_tfds("digits", None, None)


def arrays_of_unequal_length():
    tree.TreeSplit({"inputs": np.zeros((8, 4)), "labels": np.zeros(7)}, "eval_data")


def arrays_without_rows():
    tree.TreeSplit({"inputs": np.zeros((0, 4))}, "eval_data")


def _table(folder, **changes):
    """Opens a table of 6 rows and 3 columns with 2 splits, with other arrays."""
    arrays = {
        "data": np.arange(18.0).reshape(6, 3),
        "index_features": np.array([0, 1]),
        "index_target": np.array(2),
        "train_idx": np.array([[0, 1, 2, 3], [2, 3, 4, 5]]),
        "test_idx": np.array([[4, 5], [0, 1]]),
    }
    np.savez(folder / "a.npz", **arrays | changes)
    open_source(DataConfig(source=f"uci:{folder}/a.npz"))


def a_target_among_the_features(tmp_path):
    _table(tmp_path, index_target=np.array(1))


def a_table_with_one_axis(tmp_path):
    _table(tmp_path, data=np.arange(6.0))


def a_table_without_features(tmp_path):
    _table(tmp_path, index_features=np.zeros(0, int))


def a_row_in_both_parts_of_a_split(tmp_path):
    _table(tmp_path, test_idx=np.array([[4, 5], [2, 1]]))


def a_column_too_large_for_its_deviation(tmp_path):
    _table(tmp_path, data=np.arange(18.0).reshape(6, 3) * [1, 1e200, 1])


def a_constant_target(tmp_path):
    _table(tmp_path, data=np.arange(18.0).reshape(6, 3) * [1, 1, 0])


def a_value_of_a_table_that_is_nan(tmp_path):
    _table(tmp_path, data=np.full((6, 3), np.nan))


def splits_without_rows(tmp_path):
    _table(tmp_path, test_idx=np.zeros((2, 0), int))


def splits_of_unequal_number(tmp_path):
    _table(tmp_path, test_idx=np.array([[4, 5]]))


def rows_given_as_floats(tmp_path):
    _table(tmp_path, test_idx=np.array([[4.0, 5.0], [0.0, 1.0]]))


def splits_of_unequal_length(tmp_path):
    _table(tmp_path, test_idx=np.array([[4, 5], [0]], dtype=object))


def a_column_that_is_not_there(tmp_path):
    _table(tmp_path, index_target=np.array(3))
