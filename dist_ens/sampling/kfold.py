"""Cross-validation: each member leaves one fold out, and each example is in one fold."""

from types import ModuleType

import numpy as np

from dist_ens.ground.types import Array, Leaf
from dist_ens.sampling.shuffle import fold_in, mixed, shuffled


def epoch_length(num_examples: int, num_folds: int) -> int:
    """Returns the number of examples in an epoch of every member: all without the largest fold."""
    return num_examples - -(-num_examples // num_folds)


def fold_of_member(member_id: Leaf, num_folds: int, num_groups: int = 1) -> Leaf:
    """Returns the fold that a member leaves out, `member_id // num_groups % num_folds`."""
    return member_id // num_groups % num_folds


def kept(
    chosen: Array, fold: Leaf, epoch_key: list[Array], num_examples: int, num_folds: int
) -> Array:
    """Returns the places at some positions of a member's epoch, uint32[...], none in its fold.

    A place is a position in the order of the folds. All epochs are equally long. If a member leaves
    out a short fold, its epoch also skips an example that its key, two words uint32[...], chooses.
    """
    begin, end = (
        _begin(number, num_examples, num_folds).astype(np.uint32) for number in (fold, fold + 1)
    )
    length = epoch_length(num_examples, num_folds)
    is_short = num_examples - (end - begin) > np.uint32(length)
    passed_over = mixed(epoch_key[0] ^ mixed(epoch_key[1])) % np.uint32(length + 1)
    chosen = chosen + (is_short & (chosen >= passed_over)).astype(np.uint32)
    return chosen + (chosen >= begin).astype(np.uint32) * (end - begin)


def example_at(place: Array, seed: Leaf, num_examples: int, xp: ModuleType) -> Array:
    """Returns the example at a place in the order of the folds, which depends on the seed alone."""
    # The key has an axis, because NumPy warns when a scalar overflows.
    key = fold_in(xp.zeros((1, 2), np.uint32), xp.asarray(seed).reshape(1))
    words = [key[:, i].reshape((1,) * place.ndim) for i in (0, 1)]
    return shuffled(place, words, num_examples, xp)


def fold_of_example(seed: int, num_examples: int, num_folds: int) -> np.ndarray:
    """Returns the fold of each example, int32[examples]; their lengths differ by at most one."""
    places = np.arange(num_examples, dtype=np.uint32)
    begins = [_begin(fold, num_examples, num_folds) for fold in range(1, num_folds)]
    folds = np.empty(num_examples, np.int32)
    folds[example_at(places, np.uint32(seed), num_examples, np)] = np.searchsorted(
        begins, places, side="right"
    )
    return folds


def _begin(fold: Leaf, num_examples: int, num_folds: int) -> Leaf:
    """Returns the place at which a fold begins, `fold * num_examples / num_folds` rounded down."""
    short, longer = divmod(num_examples, num_folds)  # `fold * num_examples` may overflow.
    return fold * short + fold * longer // num_folds
