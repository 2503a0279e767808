"""A source of pictures in folders, one folder for each class."""

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dist_ens.data.source import Source
from dist_ens.data.spec import Spec
from dist_ens.ground.errors import UserError, counted, first_line
from dist_ens.ground.file_reading import require_readable
from dist_ens.ground.paths import given_path, shortened

if TYPE_CHECKING:
    from PIL.Image import Image

_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
_TEST_EVERY = 5  # One of so many pictures of a class is a test example, without a folder of them.


@dataclasses.dataclass(frozen=True)
class PictureSplit:
    """Pictures that are read on demand, as uint8[height, width, 3].

    `paths` are those of the files, `labels` their class numbers, int32[pictures]. A picture of
    another size than `size`, height and width, is resized if `may_resize`, and refused otherwise.
    """

    in_memory: ClassVar[bool] = False
    paths: Sequence[pathlib.Path]
    labels: np.ndarray
    size: tuple[int, int]
    may_resize: bool

    def __len__(self) -> int:
        return len(self.paths)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Reads the pictures at some positions, int64[...]."""
        read = [self._read(self.paths[index]) for index in indices.ravel()]
        inputs = np.stack(read).reshape(*indices.shape, *self.size, 3)
        return {"inputs": inputs, "labels": self.labels[indices]}

    def _read(self, path: pathlib.Path) -> np.ndarray:
        picture = read_picture(path)
        if picture.shape[:2] == self.size:
            return picture
        if not self.may_resize:
            raise UserError(
                f"{shortened(str(path))} has {picture.shape[0]} x {picture.shape[1]} pixels, and "
                f"the first picture {self.size[0]} x {self.size[1]}. Give data.image_size=(HEIGHT, "
                "WIDTH), to which all are resized."
            )
        from PIL import Image

        resized = Image.fromarray(picture).resize(self.size[::-1], Image.Resampling.BILINEAR)
        return np.asarray(resized)


def open_folder(folder: str, image_size: tuple[int, ...] | None = None) -> Source:
    """Opens a folder of pictures, `DIR/CLASS/FILE`, or `DIR/train/CLASS/FILE` with `DIR/test`.

    Without a folder `test`, a fifth of the pictures of each class is the test split, the same each
    time. Inputs are uint8[height, width, 3] in [0, 255]. Pictures are read when they are needed.

    Args:
        folder: Path of the folder.
        image_size: Height and width to which pictures are resized. None takes the size of the
            first picture, which all must have.

    Returns:
        The source, whose classes have the names of the folders.

    Raises:
        UserError: If there are fewer than two classes, or a picture cannot be read.

    >>> import tempfile
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as root:
    ...     for number in range(10):
    ...         path = pathlib.Path(root, "cat" if number % 2 else "dog", f"{number}.png")
    ...         path.parent.mkdir(exist_ok=True)
    ...         Image.new("L", (6, 4), 20 * number).save(path)
    ...     source = open_folder(root)
    ...     example = source.train.take(np.array([0]))
    >>> source.spec.class_names, len(source.train), example["inputs"].shape
    (('cat', 'dog'), 8, (1, 4, 6, 3))
    """
    root = given_path(folder, "folder:DIR")
    parts = {each.name.lower(): each for each in _folders_of(root)}
    train = parts.get("train", root / "train")
    found = _pictures(train if train.is_dir() else root)
    names = tuple(found)
    if len(names) < 2:
        raise UserError(
            f"folder:{shortened(str(root))} has pictures of {counted(len(names), 'class')}. Make "
            f"one folder of pictures for each class, such as {root / 'cat'} and {root / 'dog'}."
        )
    if train.is_dir():
        test = _pictures(parts.get("test", root / "test"))
        unknown = sorted({*test} - {*names})
        if unknown or not test:
            raise UserError(
                f"folder:{shortened(str(root))} has a folder train, and test with "
                f"{'no pictures' if not test else f'the class {unknown[0]!r}, not in train'}."
            )
        pair = found, test
    else:
        pair = _divided(found)
    first = read_picture(found[names[0]][0])
    size = (first.shape[0], first.shape[1]) if image_size is None else tuple(image_size)
    height, width = size
    splits = [_split_of(part, names, (height, width), image_size is not None) for part in pair]
    spec = Spec((height, width, 3), "uint8", (), len(names), class_names=names)
    return Source(spec, train=splits[0], test=splits[1])


def read_picture(path: pathlib.Path) -> np.ndarray:
    """Reads a picture as uint8[height, width, 3]."""
    from PIL import Image

    try:
        require_readable(path)
        with Image.open(path) as image:
            return colours_of(image)
    except (OSError, ValueError, SyntaxError) as error:  # Pillow raises these for damaged files.
        raise UserError(
            f"The picture {shortened(str(path))} cannot be read: {first_line(error)} Remove it."
        ) from error


def colours_of(image: "Image") -> np.ndarray:
    """Returns a picture of Pillow as uint8[height, width, 3], upright as its camera says."""
    from PIL import ImageOps

    # Pillow would cut grey values of 16 bits. A PNG file of 16 bits may have the mode I.
    has_16_bits = image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG")
    if image.mode in ("I", "F") and not has_16_bits:
        values = np.asarray(image)
        raise ValueError(
            f"its grey values are {values.dtype.name}, from {values.min():.4g} to "
            f"{values.max():.4g}, and not of 8 or 16 bits. Convert it."
        )
    image = ImageOps.exif_transpose(image)
    if has_16_bits:
        return np.stack([(np.asarray(image) / 257).astype(np.uint8)] * 3, axis=-1)
    return np.asarray(image.convert("RGB"))


def _folders_of(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the sorted subfolders, without hidden ones such as .ipynb_checkpoints."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(each for each in found if each.is_dir() and not each.name.startswith("."))


def _pictures(folder: pathlib.Path) -> dict[str, list[pathlib.Path]]:
    """Returns the sorted paths of the pictures in each subfolder that has some, by its name."""
    if not folder.is_dir():
        raise UserError(f"{shortened(str(folder))} is no folder. Give one with a folder a class.")
    found = {each.name: sorted(_files_of(each)) for each in _folders_of(folder)}
    return {name: paths for name, paths in found.items() if paths}


def _files_of(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the pictures in a folder and its subfolders that are not hidden."""
    for path in folder.rglob("*"):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.suffix.lower() in _SUFFIXES and not is_hidden:
            yield path


def _divided(
    found: dict[str, list[pathlib.Path]],
) -> tuple[dict[str, list[pathlib.Path]], dict[str, list[pathlib.Path]]]:
    """Returns the pictures of the training and of the test split, a fifth of each class."""
    draw = np.random.RandomState(0)
    train, test = {}, {}
    for name, paths in found.items():
        is_test = draw.permutation(len(paths)) % _TEST_EVERY == _TEST_EVERY - 1
        train[name] = [path for path, held in zip(paths, is_test, strict=True) if not held]
        test[name] = [path for path, held in zip(paths, is_test, strict=True) if held]
    return train, test


def _split_of(
    pictures: dict[str, list[pathlib.Path]],
    names: Sequence[str],
    size: tuple[int, int],
    may_resize: bool,
) -> PictureSplit:
    paths = [path for of_class in pictures.values() for path in of_class]
    labels = [names.index(name) for name, of_class in pictures.items() for _ in of_class]
    return PictureSplit(paths, np.array(labels, np.int32), size, may_resize)
