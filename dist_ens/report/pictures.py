"""Inputs that are pictures, as the report embeds them."""

import base64
import io

import numpy as np
from PIL import Image

_PICTURE_PIXELS = 96
_VISIBLE = 32  # A uint8 picture whose pixels are all below this value would look black.


def picture_url(values: np.ndarray) -> str:
    """Returns a picture as a `data:` URL, at most 96 pixels wide and high.

    Args:
        values: Pixels, [h, w] or [h, w, c]. A uint8 picture is shown unchanged if a pixel is at
            least 32. All other pictures are scaled, so that the smallest value is black and the
            largest white. With any number of channels except three, the mean over the channels is
            shown.
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
