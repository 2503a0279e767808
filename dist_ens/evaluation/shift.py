"""Shifted examples: corruptions of the inputs with five strengths each."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from scipy import ndimage
from typing_extensions import override

from dist_ens.data import Spec, Split
from dist_ens.ground.errors import UserError

STRENGTHS = (1, 2, 3, 4, 5)
# Standard deviations of the noise, as fractions of the inputs' range.
_NOISE = (0.08, 0.12, 0.18, 0.26, 0.38)
_SEEN = 1000  # Number of examples whose smallest and largest values set the inputs' range.
_MOST_ROUNDING = 0.05  # Root mean square of the rounding, as a fraction of the weakest noise.


@dataclasses.dataclass(frozen=True)
class ShiftedSplit(Split):
    """A split whose inputs, within [low, high], are always shifted in the same way."""

    split: Split
    name: str
    strength: int
    low: float
    high: float
    dtype: np.dtype

    @property
    @override
    def in_memory(self) -> bool:
        return False

    @override
    def __len__(self) -> int:
        return len(self.split)

    @override
    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        batch = self.split.take(indices)
        inputs, shift = batch["inputs"], _SHIFTS[self.name]
        span = self.high - self.low
        flat = inputs.reshape(-1, *inputs.shape[np.ndim(indices) :])
        shifted = np.empty(flat.shape, self.dtype)
        for place, (at, x) in enumerate(zip(np.ravel(indices), flat, strict=True)):
            random = np.random.default_rng([self.strength, int(at)])
            unit = (x.astype(np.float64) - self.low) / span
            worse = np.clip(shift(unit, self.strength - 1, random), 0, 1) * span + self.low
            shifted[place] = np.round(worse) if self.dtype.kind in "iu" else worse
        return {**batch, "inputs": shifted.reshape(inputs.shape)}


def shifted_splits(split: Split, spec: Spec) -> dict[str, list[ShiftedSplit]]:
    """Returns the shifted splits of a split, by name of the shift, in ascending strength.

    Only pictures, [height, width] or [height, width, channels], get more than noise. Inputs keep
    their type if its steps are small compared with the weakest noise, such as uint8 from 0 to 255.
    Others become float32, as rounding would remove or exaggerate a shift.
    """
    if spec.label_shape or spec.num_groups > 1:
        raise UserError(
            f"The data is {spec}, and only pictures and plain numbers of one group can be shifted. "
            "Leave --shift out."
        )
    is_picture = len(spec.input_shape) in (2, 3)
    seen = split.take(np.arange(min(len(split), _SEEN)))["inputs"]
    low, high = float(seen.min()), float(seen.max())
    dtype = seen.dtype if _is_fine(seen.dtype, low, high) else np.dtype(np.float32)
    names = _SHIFTS if is_picture else ("gaussian_noise",)
    return {
        name: [ShiftedSplit(split, name, strength, low, high, dtype) for strength in STRENGTHS]
        for name in names
    }


def _is_fine(dtype: np.dtype, low: float, high: float) -> bool:
    """Returns whether the rounding of a type in a range is small beside the weakest noise."""
    step = 1.0 if dtype.kind in "biu" else np.spacing(dtype.type(max(abs(low), abs(high))))
    # Rounding to steps of 1 has a root mean square error of 1 / sqrt(12).
    return bool(step / math.sqrt(12) <= _MOST_ROUNDING * _NOISE[0] * (high - low))


def _gaussian_noise(x: np.ndarray, at: int, random: np.random.Generator) -> np.ndarray:
    return x + random.normal(scale=_NOISE[at], size=x.shape)


def _blur(x: np.ndarray, at: int, random: np.random.Generator) -> np.ndarray:
    """Applies a Gaussian blur, with a standard deviation that is a fraction of the height."""
    sigma = (0.02, 0.03, 0.04, 0.06, 0.08)[at] * x.shape[0]
    return ndimage.gaussian_filter(x, (sigma, sigma, *(0,) * (x.ndim - 2)))


def _contrast(x: np.ndarray, at: int, random: np.random.Generator) -> np.ndarray:
    mean = x.mean(axis=(0, 1), keepdims=True)
    return mean + (0.75, 0.5, 0.4, 0.3, 0.15)[at] * (x - mean)


def _rotation(x: np.ndarray, at: int, random: np.random.Generator) -> np.ndarray:
    angle = (15, 30, 45, 60, 75)[at] * random.choice((-1, 1))
    return ndimage.rotate(x, angle, reshape=False, order=1, mode="nearest")


# Functions of an input with values in [0, 1], the strength from 0, and the example's generator.
_SHIFTS: dict[str, Callable[[np.ndarray, int, np.random.Generator], np.ndarray]] = {
    "gaussian_noise": _gaussian_noise,
    "blur": _blur,
    "contrast": _contrast,
    "rotation": _rotation,
}
