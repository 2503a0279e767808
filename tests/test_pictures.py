"""Pictures in folders, and data sets of the library `datasets`, as sources."""

import datasets
import flax.linen as nn
import numpy as np
import optax
import pytest
from PIL import Image

import dist_ens as de
from commands import dist_ens
from dist_ens.data import open_folder
from dist_ens.data.pictures import read_picture
from dist_ens.ground.errors import UserError


def write_pictures(root, count=20, size=(6, 4)):
    """Writes dark pictures of the class `night` and bright ones of `noon`."""
    for number in range(count):
        name, value = ("night", 20) if number % 2 else ("noon", 220)
        path = root / name / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (value + number, value, value)).save(path)


def test_a_folder_has_a_class_for_each_subfolder_and_a_fifth_of_each_is_tested(tmp_path):
    write_pictures(tmp_path)
    source = open_folder(str(tmp_path))
    assert source.spec.class_names == ("night", "noon")
    assert np.bincount(source.test.labels).tolist() == [2, 2]
    examples = source.train.take(np.arange(len(source.train)).reshape(2, 8))
    assert examples["inputs"].shape == (2, 8, 4, 6, 3)
    assert examples["inputs"].dtype == np.uint8
    assert (examples["inputs"][..., 1] > 100).all(axis=(2, 3)).astype(int).tolist() == (
        examples["labels"].tolist()
    )


def test_own_folders_of_training_and_test_are_taken(tmp_path):
    write_pictures(tmp_path / "train", 8)
    write_pictures(tmp_path / "test", 4)
    source = open_folder(str(tmp_path))
    assert (len(source.train), len(source.test)) == (8, 4)


def test_pictures_of_other_sizes_are_refused_or_resized(tmp_path):
    write_pictures(tmp_path)
    write_pictures(tmp_path / "night" / "more", 2, size=(9, 9))
    resized = open_folder(str(tmp_path), (8, 5))
    for split in (resized.train, resized.test):
        assert split.take(np.arange(len(split)))["inputs"].shape[1:] == (8, 5, 3)
    source = open_folder(str(tmp_path))
    # The two others may be in one split, or one in each.
    split = next(s for s in (source.train, source.test) if any("more" in str(p) for p in s.paths))
    with pytest.raises(UserError, match=r"has 9 x 9 pixels, and the first picture 4 x 6"):
        split.take(np.arange(len(split)))


def test_a_damaged_picture_and_a_folder_of_one_class_are_told(tmp_path):
    write_pictures(tmp_path)
    (tmp_path / "night" / "01.png").write_bytes(b"no picture")
    with pytest.raises(UserError, match=r"The picture .*01\.png' cannot be read"):
        open_folder(str(tmp_path))
    with pytest.raises(UserError, match="has pictures of 0 classes"):
        open_folder(str(tmp_path / "noon"))


def test_a_command_trains_on_a_folder(tmp_path):
    write_pictures(tmp_path / "p", 60)
    run = tmp_path / "run"
    ended = dist_ens(
        "train",
        "--config=configs/digits.py",
        f"--config.data.source=folder:{tmp_path}/p",
        "--config.data.std=(255.0,)",
        "--config.data.mean=(0.0,)",
        "--config.steps=30",
        "--config.data.global_batch_size=16",
        f"--workdir={run}",
    )
    assert ended.returncode == 0, ended.stderr
    assert de.load(run).evaluate(intervals=False).ensemble["accuracy"] == 1


def test_a_data_set_of_hugging_face_is_a_source():
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 2, 60)
    pictures = [Image.new("L", (5, 5), int(200 * label + 20)) for label in labels]
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["dark", "bright"])}
    )
    rows = datasets.Dataset.from_dict({"image": pictures, "label": labels}, features=features)
    parts = rows.train_test_split(20, seed=0)
    source = de.data.hugging_face(parts["train"], parts["test"])
    assert source.spec.class_names == ("dark", "bright")
    assert source.spec.input_shape == (5, 5)
    network = nn.Sequential([lambda x: x.reshape(len(x), -1) / 255.0, nn.Dense(2)])
    ensemble = de.Ensemble(network, optax.adam(0.1), de.losses.categorical(2), num_members=2)
    state = de.fit(ensemble, source, steps=40, batch_size=8, progress=False).state
    assert de.evaluate(ensemble, state, source, intervals=False).ensemble["accuracy"] == 1
    with pytest.raises(UserError, match="no column 'picture'"):
        de.data.hugging_face(rows, rows, inputs="picture")
    with pytest.raises(UserError, match="The training rows are a DatasetDict"):
        de.data.hugging_face(parts, rows)
    for wrong, message in (
        ({"image": [[0.0], [1.0]], "label": [0, None]}, "Labels are missing in the column 'label'"),
        ({"image": [[0.0], [1.0, 2.0]], "label": [0, 1]}, r"rows of the shapes \(1,\) and \(2,\)"),
    ):
        rows = datasets.Dataset.from_dict(wrong)
        with pytest.raises(UserError, match=message):
            de.data.hugging_face(rows, rows).train.take(np.arange(2))


def test_colours_of_a_palette_are_read_as_such():
    palette = Image.fromarray(np.array([[[200, 0, 0], [0, 200, 0]]], np.uint8)).quantize(2)
    assert palette.mode == "P"
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int32")})
    rows = datasets.Dataset.from_dict({"image": [palette] * 2, "label": [0, 1]}, features=features)
    read = de.data.hugging_face(rows, rows).train.take(np.arange(1))["inputs"]
    assert read[0, 0].tolist() == [[200, 0, 0], [0, 200, 0]]


def test_pictures_are_upright_and_numbers_that_are_no_colours_are_refused(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # The camera was turned by a quarter.
    Image.new("RGB", (6, 4)).save(tmp_path / "a.jpg", exif=exif)
    assert read_picture(tmp_path / "a.jpg").shape == (6, 4, 3)
    Image.fromarray(np.full((2, 2), 200, np.int32)).save(tmp_path / "b.tif")
    with pytest.raises(UserError, match="grey values are int32, from 200 to 200"):
        read_picture(tmp_path / "b.tif")
    Image.fromarray(np.full((2, 2), 0.5, np.float32)).save(tmp_path / "c.tif")
    with pytest.raises(UserError, match="grey values are float32, from 0.5 to 0.5"):
        read_picture(tmp_path / "c.tif")


def test_hidden_folders_hold_no_pictures_and_names_of_parts_may_be_capitals(tmp_path):
    for folder in ("Train/a", "Train/b", "Test/a", "Test/b", "Train/a/.ipynb_checkpoints", ".x"):
        (tmp_path / folder).mkdir(parents=True)
        Image.new("L", (4, 4)).save(tmp_path / folder / "1.png")
    source = open_folder(str(tmp_path))
    assert source.spec.class_names == ("a", "b")
    assert (len(source.train), len(source.test)) == (2, 2)


def test_grey_values_of_16_bits_are_scaled(tmp_path):
    values = np.array([[0, 257 * 100], [65535, 257 * 7]], np.uint16)
    Image.fromarray(values).save(tmp_path / "a.png")
    assert read_picture(tmp_path / "a.png")[..., 0].tolist() == [[0, 100], [255, 7]]
