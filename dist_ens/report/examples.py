"""Single examples and the scores of classes, as a report page lists them."""

import base64
import dataclasses
import io
import math
from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image

from dist_ens.ground.json_text import Json
from dist_ens.metrics.catalogue import label_of
from dist_ens.report.facts import is_finite, number
from dist_ens.report.panels import Shown, having

_PICTURE_PIXELS = 96
_VISIBLE = 32  # A uint8 picture whose pixels are all below this value would look black.


@dataclasses.dataclass(frozen=True)
class Listed:
    """A list of examples or of classes of one run, each a row of the texts of its fields.

    The title is empty for a single run, and `urls` if an example has no picture.
    """

    title: str
    fields: Sequence[str]
    rows: Sequence[Sequence[str]]
    urls: Sequence[str] = ()


def part_lists(shown: Sequence[Shown], kind: str) -> list[Listed]:
    """Returns the scores of each class or target, of the runs that have some."""
    lists = []
    for each in shown:
        rows, scores = each.run.summary.get(f"by_{kind}", []), each.run.summary.get("test", {})
        found = list(dict.fromkeys(name for row in rows for name in row))
        # The accuracy on the examples of a class is its recall.
        texts = [name for name in found if name in (kind, "examples")]
        names = [name for name in found if name not in (*texts, "accuracy")]
        cells = [
            [*(str(row[n]) for n in texts), *(number(row.get(n), scores) for n in names)]
            for row in rows
        ]
        lists.append(Listed(each.title, [*texts, *map(label_of, names)], cells))
    return [each for each in lists if each.rows]


def example_lists(shown: Sequence[Shown], name: str) -> list[Listed]:
    """Returns the examples of a name in the curves, with pictures if all of a run have one."""
    lists = []
    for each, examples in having(shown, name):
        scores = each.run.summary.get("test", {})
        fields = list(dict.fromkeys(field for example in examples for field in example))
        first = 0 if name == "hardest" else len(each.run.curves.get("hardest", []))
        pictures = each.run.pictures[first : first + len(examples)]
        has_pictures = len(pictures) == len(examples)
        rows = [[_text(f, example.get(f), scores) for f in fields] for example in examples]
        urls = [picture_url(values) for values in pictures] if has_pictures else []
        lists.append(Listed(each.title, [*map(label_of, fields)], rows, urls))
    return lists


def _text(field: str, value: Json, scores: Mapping[str, Json]) -> str:
    """Returns a field of an example as text: a name, a class, a target, or a score."""
    if isinstance(value, str):
        return value
    if is_finite(value) and float(value).is_integer():
        return f"{value:.0f}"
    rmse: Json = scores.get("rmse")
    if field in ("label", "prediction") and is_finite(value) and is_finite(rmse) and rmse > 0:
        # Enough digits show an error even if the target is far larger.
        return f"{value:.{max(2 - math.floor(math.log10(rmse)), 0)}f}"
    return number(value, scores)


def picture_url(values: np.ndarray) -> str:
    """Returns a picture, [h, w] or [h, w, c], as a `data:` URL of at most 96 x 96 pixels.

    A uint8 picture is shown unchanged if a pixel is at least 32. All others are scaled from black
    to white. With any number of channels except three, their mean is shown.
    """
    values = np.asarray(values)
    as_it_is = values.dtype == np.uint8 and values.max() >= _VISIBLE
    if values.ndim == 3 and values.shape[-1] != 3:
        values = values.mean(axis=-1)
    if as_it_is:
        values = values.astype(np.uint8)
    else:
        values = np.nan_to_num(values.astype(float), posinf=0, neginf=0)
        low, high = values.min(), values.max()
        values = (255 * (values - low) / max(high - low, 1e-30)).round().astype(np.uint8)
    image = Image.fromarray(values)
    image.thumbnail((_PICTURE_PIXELS, _PICTURE_PIXELS))
    file = io.BytesIO()
    image.save(file, format="PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
