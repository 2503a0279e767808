"""Shifted examples: corruptions of the inputs with five strengths each."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from scipy import ndimage

from dist_ens.data import ArraySplit, Spec, Split
from dist_ens.errors import BrokenMembersError, UserError, first_line
from dist_ens.evaluation.evaluator import Evaluator
from dist_ens.state import State

STRENGTHS = (1, 2, 3, 4, 5)
# Standard deviations of the noise, as fractions of the inputs' range.
_NOISE = (0.08, 0.12, 0.18, 0.26, 0.38)
_SEEN = 1000  # Number of examples whose smallest and largest values set the inputs' range.
_MOST_ROUNDING = 0.05  # Root mean square of the rounding, as a fraction of the weakest noise.
_TRIED = 64  # Number of examples on which a network is tried.
_TOLERANCE = 1e-3


@dataclasses.dataclass(frozen=True)
class ShiftedSplit:
    """A split with shifted inputs. An example is always shifted in the same way.

    Attributes:
        split: Split with the original examples.
        name: Name of the shift, such as "blur".
        strength: Strength of the shift, from 1 to 5.
        low: Smallest value that an input may have.
        high: Largest value that an input may have.
        dtype: Type of the shifted inputs: the type of the split's inputs, or float32 if that type
            is too coarse.
    """

    split: Split
    name: str
    strength: int
    low: float
    high: float
    dtype: np.dtype

    @property
    def in_memory(self) -> bool:
        """Whether the examples are held in memory."""
        return False

    def __len__(self) -> int:
        return len(self.split)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the examples at some positions, with shifted inputs.

        Args:
            indices: Positions in the split, int[...].
        """
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

    Pictures, [height, width] or [height, width, channels], get noise, blur, lower contrast and
    rotations. All other inputs get noise only. Values stay within the range of the first examples.
    Inputs keep their type if its steps are small compared with the weakest noise, such as uint8
    from 0 to 255. For booleans, or uint8 from 0 to 16, rounding would remove or exaggerate a shift.
    Such shifted inputs are float32; see `require_float_inputs`.

    Args:
        split: Split with the original examples.
        spec: Description of the data.

    Raises:
        UserError: If an example has several labels, as text has, the data has several groups, the
            inputs are constant, or even float32 is too coarse for them.
    """
    if spec.label_shape or spec.num_groups > 1:
        raise UserError(
            f"The data is {spec}, and only pictures and plain numbers of one group can be shifted. "
            "Leave --shift out."
        )
    is_picture = len(spec.input_shape) in (2, 3)
    seen = split.take(np.arange(min(len(split), _SEEN)))["inputs"]
    low, high = float(seen.min()), float(seen.max())
    if low == high:
        raise UserError(
            f"All inputs are {low}, and constant inputs cannot be shifted. Leave --shift out."
        )
    candidates = (seen.dtype, np.dtype(np.float32))
    dtype = next((each for each in candidates if _is_fine(each, low, high)), None)
    if dtype is None:
        raise UserError(
            f"Inputs from {low:.9g} to {high:.9g} cannot be shifted: float32 has steps of "
            f"{_step(np.dtype(np.float32), low, high):g} there, and the weakest noise has a "
            f"standard deviation of {_NOISE[0] * (high - low):.3g}. Subtract the offset from the "
            "inputs and train again, or leave --shift out."
        )
    names = _SHIFTS if is_picture else ("gaussian_noise",)
    return {
        name: [ShiftedSplit(split, name, strength, low, high, dtype) for strength in STRENGTHS]
        for name in names
    }


def require_float_inputs(evaluator: Evaluator, state: State, shifted: ShiftedSplit) -> None:
    """Raises a `UserError` unless the members accept shifted inputs of another type.

    Unshifted examples must have the same predictions in both types. Fractions of a step of the
    original type must change predictions. A network that looks up its inputs in a table, or rounds
    them, fails these checks.

    Args:
        evaluator: Evaluator of the ensemble.
        state: State of the ensemble.
        shifted: Shifted split whose inputs have another type than the original split.

    Raises:
        UserError: If the network raises an error, its predictions depend on the type, or it ignores
            fractions.
    """
    batch = shifted.split.take(np.arange(min(len(shifted.split), _TRIED)))
    own = batch["inputs"]

    def predicted(inputs: np.ndarray) -> list[np.ndarray]:
        told = evaluator.member_predictions(state, ArraySplit(inputs, batch["labels"]))
        return list(next(told).values())

    values = own.astype(np.float64)
    inwards = _step(own.dtype, shifted.low, shifted.high) * np.where(values < shifted.high, 1, -1)
    expected = predicted(own)
    try:
        same, a_fifth, two_fifths, whole = (
            predicted((values + part * inwards).astype(shifted.dtype))
            for part in (0.0, 0.2, 0.4, 1.0)
        )
    except BrokenMembersError:
        raise
    except Exception as error:  # A user's network may raise any error for another type.
        raise UserError(
            f"The network does not take its {own.dtype} inputs as {shifted.dtype}, in which they "
            f"are shifted: {type(error).__name__}: {first_line(error)} Let it convert its inputs "
            "to float32, or leave --shift out."
        ) from error
    if not all(map(_are_close, expected, same)):
        raise UserError(
            f"The network predicts something else for its {own.dtype} inputs than for the same "
            f"numbers in {shifted.dtype}, in which they are shifted. Let it convert its inputs to "
            "float32, or leave --shift out."
        )
    if all(map(np.array_equal, a_fifth, two_fifths)) and not all(
        map(np.array_equal, a_fifth, whole)
    ):
        raise UserError(
            f"The network rounds its inputs: it does not see fractions of a step of {own.dtype}, "
            "which shifted inputs have. Let it convert its inputs to float32, or leave --shift out."
        )


def _is_fine(dtype: np.dtype, low: float, high: float) -> bool:
    """Returns whether the rounding of a type in a range is small beside the weakest noise."""
    # Rounding to steps of 1 has a root mean square error of 1 / sqrt(12).
    rounding = _step(dtype, low, high) / math.sqrt(12)
    return rounding <= _MOST_ROUNDING * _NOISE[0] * (high - low)


def _step(dtype: np.dtype, low: float, high: float) -> float:
    """Returns the largest distance between neighbouring values of a type in a range."""
    if dtype.kind in "biu":
        return 1.0
    return float(np.spacing(dtype.type(max(abs(low), abs(high)))))


def _are_close(a: np.ndarray, b: np.ndarray) -> bool:
    """Returns whether two predictions are equal up to a tolerance."""
    return np.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)


def _gaussian_noise(x: np.ndarray, at: int, random: np.random.Generator) -> np.ndarray:
    """Adds Gaussian noise, with a standard deviation that is a fraction of the inputs' range.

    Args:
        x: Input with values in [0, 1].
        at: Strength, from 0.
        random: Generator of the example's random numbers.
    """
    return x + random.normal(scale=_NOISE[at], size=x.shape)


def _blur(x: np.ndarray, at: int, random: np.random.Generator) -> np.ndarray:
    """Applies a Gaussian blur, with a standard deviation that is a fraction of the height."""
    sigma = (0.02, 0.03, 0.04, 0.06, 0.08)[at] * x.shape[0]
    return ndimage.gaussian_filter(x, (sigma, sigma, *(0,) * (x.ndim - 2)))


def _contrast(x: np.ndarray, at: int, random: np.random.Generator) -> np.ndarray:
    """Lowers the contrast, by moving values towards the mean of each channel."""
    mean = x.mean(axis=(0, 1), keepdims=True)
    return mean + (0.75, 0.5, 0.4, 0.3, 0.15)[at] * (x - mean)


def _rotation(x: np.ndarray, at: int, random: np.random.Generator) -> np.ndarray:
    """Rotates the picture to the left or right, with corners filled from the nearest edge."""
    angle = (15, 30, 45, 60, 75)[at] * random.choice((-1, 1))
    return ndimage.rotate(x, angle, reshape=False, order=1, mode="nearest")


_SHIFTS: dict[str, Callable[[np.ndarray, int, np.random.Generator], np.ndarray]] = {
    "gaussian_noise": _gaussian_noise,
    "blur": _blur,
    "contrast": _contrast,
    "rotation": _rotation,
}
