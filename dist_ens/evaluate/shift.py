"""The same examples, made worse in known ways, by five strengths each."""

import dataclasses
from collections.abc import Callable

import numpy as np
from scipy import ndimage

from dist_ens.data import Spec, Split
from dist_ens.errors import UserError

STRENGTHS = (1, 2, 3, 4, 5)
_SEEN = 1000  # examples whose smallest and largest value is taken for the inputs' range


@dataclasses.dataclass(frozen=True)
class ShiftedSplit:
    """A split whose inputs are shifted; each example always in the same way.

    Attributes:
        split: The examples.
        name: Of `shifts_of` their kind.
        strength: From 1 to 5.
        low: Smallest value that an input may have.
        high: Largest.
    """

    split: Split
    name: str
    strength: int
    low: float
    high: float

    @property
    def in_memory(self) -> bool:
        """See `Split`."""
        return False

    def __len__(self) -> int:
        return len(self.split)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """See `Split.take`."""
        batch = self.split.take(indices)
        inputs, shift = batch["inputs"], _SHIFTS[self.name]
        span = self.high - self.low
        flat = inputs.reshape(-1, *inputs.shape[np.ndim(indices) :])
        shifted = np.empty_like(flat)
        for place, (at, x) in enumerate(zip(np.ravel(indices), flat, strict=True)):
            random = np.random.default_rng([self.strength, int(at)])
            unit = (x.astype(np.float64) - self.low) / span
            worse = np.clip(shift(unit, self.strength - 1, random), 0, 1) * span + self.low
            shifted[place] = np.round(worse) if inputs.dtype.kind in "iu" else worse
        return {**batch, "inputs": shifted.reshape(inputs.shape)}


def shifted_splits(split: Split, spec: Spec) -> dict[str, list[ShiftedSplit]]:
    """A split under every shift that its inputs allow, by name in the order of the strengths.

    Pictures, [height, width] or [height, width, channels], are made noisy, blurred, flat and
    turned; any other inputs only noisy. Values stay within those that the first examples span.

    Args:
        split: The examples.
        spec: Of them.

    Raises:
        UserError: If inputs are tokens, which are not made a little worse.
    """
    if spec.label_shape or spec.num_groups > 1:
        raise UserError(
            "Pictures and plain numbers of one group are shifted. Received: "
            f"{spec}. Leave --shift out."
        )
    is_picture = len(spec.input_shape) in (2, 3)
    seen = split.take(np.arange(min(len(split), _SEEN)))["inputs"]
    low, high = float(seen.min()), float(seen.max())
    if low == high:
        raise UserError(f"Inputs that are shifted vary. Received: only {low}. Leave --shift out.")
    names = _SHIFTS if is_picture else ("gaussian_noise",)
    return {
        name: [ShiftedSplit(split, name, strength, low, high) for strength in STRENGTHS]
        for name in names
    }


def _gaussian_noise(x: np.ndarray, at: int, random: np.random.Generator) -> np.ndarray:
    """Of a standard deviation that is a part of the inputs' range."""
    return x + random.normal(scale=(0.08, 0.12, 0.18, 0.26, 0.38)[at], size=x.shape)


def _blur(x: np.ndarray, at: int, random: np.random.Generator) -> np.ndarray:
    """Gaussian, its standard deviation a part of the picture's height."""
    sigma = (0.02, 0.03, 0.04, 0.06, 0.08)[at] * x.shape[0]
    return ndimage.gaussian_filter(x, (sigma, sigma, *(0,) * (x.ndim - 2)))


def _contrast(x: np.ndarray, at: int, random: np.random.Generator) -> np.ndarray:
    """Towards the mean of the picture's channels."""
    mean = x.mean(axis=(0, 1), keepdims=True)
    return mean + (0.75, 0.5, 0.4, 0.3, 0.15)[at] * (x - mean)


def _rotation(x: np.ndarray, at: int, random: np.random.Generator) -> np.ndarray:
    """By an angle to the left or right, the corners filled by the picture's edge."""
    angle = (15, 30, 45, 60, 75)[at] * random.choice((-1, 1))
    return ndimage.rotate(x, angle, reshape=False, order=1, mode="nearest")


_SHIFTS: dict[str, Callable[[np.ndarray, int, np.random.Generator], np.ndarray]] = {
    "gaussian_noise": _gaussian_noise,
    "blur": _blur,
    "contrast": _contrast,
    "rotation": _rotation,
}
