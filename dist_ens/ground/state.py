"""The state of a member and of an ensemble, and functions to stack and select members."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.ground.errors import UserError, counted, kind_of
from dist_ens.ground.narrowing import generator_of, held_dtype, host_array, narrowed
from dist_ens.ground.types import (
    Key,
    KeyPath,
    Leaf,
    ModelState,
    OptState,
    Params,
    PyTree,
    Tree,
)


@jax.tree_util.register_static
class ClassNames(tuple[str, ...]):
    """The names of classes in the order of their numbers, as a pytree without leaves."""


class Stopping(NamedTuple):
    """The record of a member that a callback may stop.

    Attributes:
        stopped_step: Step at which it has stopped, int32[]; -1 while it is trained.
        best_step: Step of its best evaluation, int32[]; -1 before it. Empty without `best`.
        best: Parts of the state by which it is evaluated, at that step; empty if not kept.
    """

    stopped_step: jax.Array
    best_step: PyTree = ()
    best: PyTree = ()


def finished_leaves(leaves: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the leaves of a state by name, without the record of stops.

    Each member has its best parameters, if they were kept.
    """
    found = {name: leaf for name, leaf in leaves.items() if not name.startswith("stopping.")}
    for place, part in enumerate(("params", "model_state", "opt_state")):
        prefix = f"stopping.best.{place}"
        for name in leaves:
            if name == prefix or name.startswith(f"{prefix}."):
                was_best = leaves["stopping.best_step"] >= 0
                own = part + name.removeprefix(prefix)
                meant = was_best.reshape(-1, *(1,) * (leaves[name].ndim - 1))
                found[own] = np.where(meant, leaves[name], leaves[own])
    return found


class State(NamedTuple):
    """The state of a member. In the state of an ensemble, every leaf has a leading members axis.

    Attributes:
        step: Number of updates taken, int32[], modulo 2^32: it is negative from 2^31 on.
        member_id: Lasting id of the member, int32[].
        key: Key of the member, which depends on the seed and `member_id` alone, [].
        params: Parameters of the network, a pytree.
        model_state: Other state of the network, such as running statistics, a pytree.
        opt_state: State of the optimizer, a pytree.
        failures: Record of failed updates, a `FailureRecord`. It is empty for an ensemble whose
            updates are not checked.
        class_names: `ClassNames` of the labels that `fit` was given, such as ("cat", "dog"). It is
            empty if the labels were numbers.
        hyper: Settings whose values differ from member to member, {name: float32[]}. It is empty
            for an ensemble without them.
        stopping: `Stopping` of a run whose callbacks may stop members, and empty otherwise.

    >>> state = State(np.int32(3), np.int32(0), jax.random.key(0), {"w": 1.0}, (), ())
    >>> state._replace(params={"w": 2.0}).params
    {'w': 2.0}
    """

    step: jax.Array
    member_id: jax.Array
    key: Key
    params: Params
    model_state: ModelState
    opt_state: OptState
    failures: PyTree = ()
    class_names: tuple[str, ...] = ()
    hyper: PyTree = ()
    stopping: PyTree = ()

    def select(self, member_ids: Sequence[int]) -> "State":
        """Returns the state of some members of an ensemble.

        The state must be in one process. On several hosts, `load` reads some members of a saved
        run.

        Args:
            member_ids: Ids of the members, in the order of the result, integers or int[members].

        Returns:
            The state, leaves [len(member_ids), ...]. An ensemble takes it on any layout.

        Raises:
            UserError: If an id is not there, is given twice, or none is given.

        >>> network = lambda i: State(np.int32(3), i, jax.random.key(0), {"w": 1.0 * i}, (), ())
        >>> state = stack_members([network(i) for i in range(4)])
        >>> state.select([3, 1]).params["w"]
        Array([3., 1.], dtype=float32)
        """
        check_alive(self.step)
        ids, asked = (np.asarray(each).tolist() for each in (self.member_id, member_ids))
        if not asked or len({*asked}) < len(asked) or not {*asked} <= {*ids}:
            raise UserError(
                f"The state has the members {str(ids)[:200]}, and {str(asked)[:200]} were asked "
                "for. Give ids that it has, each once."
            )
        return select_members(self, [ids.index(member_id) for member_id in asked])

    @staticmethod
    def concatenate(states: Sequence["State"]) -> "State":
        """Returns one state with the members of several ensembles, one ensemble after another.

        Args:
            states: States of ensembles of one architecture and one optimizer, at least one, whose
                members all have different ids.

        Returns:
            The state, on one device. An ensemble with these `member_ids` takes it on any layout.

        Raises:
            UserError: If the states differ in shapes, types or steps, or two members have the same
                id.

        >>> network = lambda i: State(np.int32(3), i, jax.random.key(0), {"w": 1.0 * i}, (), ())
        >>> first, second = (stack_members([network(i) for i in ids]) for ids in ([0, 1], [2]))
        >>> State.concatenate([first, second]).member_id
        Array([0, 1, 2], dtype=int32)
        """
        for state in states:
            check_alive(state.step)
        _require_alike("state", [jax.tree.map(lambda leaf: leaf[0], state) for state in states])
        whole = jax.tree.map(_concatenated, *states)
        ids, steps = np.asarray(whole.member_id).tolist(), {*np.asarray(whole.step).tolist()}
        if len({*ids}) < len(ids) or len(steps) > 1:
            raise UserError(
                f"The states have the members {str(ids)[:200]} at the steps {sorted(steps)}. Some "
                "have the same id, or other steps. Join members of different ids and one step."
            )
        return whole


def check_alive(step: object) -> None:
    """Raises a `UserError` if a state, of which this is the step, was donated to an update."""
    if isinstance(step, jax.Array) and step.is_deleted():
        raise UserError(
            "The state was given to an update before, which has freed its arrays. Use the state "
            "that it returned: state, metrics = ensemble.update(state, batch)."
        )


def without_weak_types(tree: Tree) -> Tree:
    """Returns a pytree of arrays without weak types.

    JAX gives a Python number a weak type, and an update changes it to a strong type. If a state had
    weak types, its update would be compiled again for the second call.

    >>> without_weak_types(jnp.asarray(1.0)).weak_type
    False
    """

    def strong(leaf: Leaf) -> jax.Array:
        leaf = jnp.asarray(leaf)
        is_weak = getattr(leaf, "weak_type", False)  # Keys have no weak type.
        return jax.lax.convert_element_type(leaf, leaf.dtype) if is_weak else leaf

    return jax.tree.map(strong, tree)


def stack_members(members: Sequence[Tree]) -> Tree:
    """Stacks a list of pytrees into one pytree of arrays.

    Args:
        members: Pytrees of the members, at least one, with equal structures, shapes and types.

    Returns:
        A pytree of the same structure, leaves [members, ...].

    Raises:
        UserError: If the list is empty, or two members differ in shapes or types; the message names
            the member, the leaf and both shapes. Also if the class of a member is not registered
            as a pytree, or a number does not fit in 32 bits.

    >>> stack_members([{"w": np.zeros(3)}, {"w": np.ones(3)}])["w"]
    Array([[0., 0., 0.],
           [1., 1., 1.]], dtype=float32)
    """
    if not members:
        raise UserError("The list of members is empty. Give at least one member.")
    for member in members:
        require_arrays(member)
    _require_alike("member", members)
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(as_held, members))


def unstack_members(ensemble: Tree) -> list[Tree]:
    """Returns the members of a stacked pytree as a list; the inverse of `stack_members`.

    Args:
        ensemble: Pytree with leaves [members, ...].

    Returns:
        A list with one pytree for each member, leaves [...].

    Raises:
        UserError: If the leaves have different numbers of members.

    >>> [member["w"].tolist() for member in unstack_members({"w": np.array([[1, 2], [3, 4]])})]
    [[1, 2], [3, 4]]
    """
    return [jax.tree.map(lambda leaf: leaf[i], ensemble) for i in range(_count(ensemble))]  # noqa: B023


def select_members(ensemble: Tree, positions: Sequence[int]) -> Tree:
    """Returns a subset of an ensemble, in the order of the given positions.

    Args:
        ensemble: Pytree with leaves [members, ...].
        positions: Positions of the members to take, whole numbers in [0, members).

    Returns:
        A pytree with leaves [len(positions), ...].

    Raises:
        UserError: If a position does not exist, or the leaves have different numbers of members.

    >>> select_members({"w": np.arange(4)}, [3, 1])["w"]
    Array([3, 1], dtype=int32)
    """
    count = _count(ensemble)
    wrong = [p for p in positions if not 0 <= p < count]
    if wrong:
        raise UserError(
            f"Positions {wrong} do not exist: the ensemble has {counted(count, 'member')}. Use "
            f"positions from 0 to {count - 1}."
        )
    index = np.asarray(positions, np.int32)
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[index], ensemble)


def _require_alike(noun: str, trees: Sequence[PyTree]) -> None:
    """Raises a `UserError` if a pytree has other leaves, shapes or types than the first one."""
    first, *others = map(leaf_types, trees)
    for number, types in enumerate(others, start=1):
        for name in differing(first, types):
            raise UserError(
                f"{noun.capitalize()} {number} cannot be stacked with {noun} 0: leaf {name} is "
                f"{types.get(name, 'absent')} in {noun} {number} and {first.get(name, 'absent')} "
                f"in {noun} 0. All members of one ensemble share one architecture."
            )


def _concatenated(*leaves: Leaf) -> jax.Array:
    """Returns arrays of any layouts, one after another along the members axis, on one device."""
    if jnp.issubdtype(leaves[0].dtype, jax.dtypes.prng_key):
        data = _concatenated(*map(jax.random.key_data, leaves))
        return jax.random.wrap_key_data(data, dtype=leaves[0].dtype)
    return jnp.asarray(np.concatenate([np.asarray(leaf) for leaf in leaves]))


def as_held(tree: Tree, name: str = "") -> Tree:
    """Returns a pytree whose NumPy arrays have the types in which JAX holds them."""
    leaves, structure = jax.tree.flatten(tree)
    held = [
        leaf if isinstance(leaf, jax.Array) else held_array(leaf, _Place(tree, number, name))
        for number, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, held)


class _Place:
    """The name of a leaf for an error message. It is made when it is read, since that is slow."""

    def __init__(self, tree: PyTree, number: int, name: str) -> None:
        self._tree, self._number, self._name = tree, number, name

    def __str__(self) -> str:
        path, _ = jax.tree_util.tree_leaves_with_path(self._tree)[self._number]
        named = f"{self._name}{jax.tree_util.keystr(path)}"
        return named if self._name else f"Leaf {leaf_name(path)}"


def require_state(state: object) -> None:
    """Raises a `UserError` unless a value is a `State`. People give the result of `fit`."""
    if not isinstance(state, State):
        raise UserError(f"The state is {kind_of(state)}. Give a State, such as result.state.")


def require_arrays(tree: PyTree) -> None:
    """Raises a `UserError` unless every leaf is an array or a number."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, float | int | complex):
            name = type(leaf).__name__
            raise UserError(
                f"Leaf {leaf_name(path)} of a member is an object of class {name!r}, which is not "
                "registered as a pytree. Put @jax.tree_util.register_dataclass above a dataclass, "
                f"or call jax.tree_util.register_pytree_node({name}, flatten, unflatten). Keep "
                "functions out: equinox.partition(module, equinox.is_array) splits a module."
            )


def refuse_lists(tree: PyTree, what: str, *, and_numbers: bool = True) -> None:
    """Raises a `UserError` if a pytree has lists of numbers or texts, or numbers, for arrays.

    JAX takes a list of numbers as a pytree with a leaf for each number.
    """

    def is_list(part: object) -> bool:
        is_nested = isinstance(part, list)
        while isinstance(part, list) and part:
            part = part[0]
        return is_nested and _is_plain(part)

    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_list):
        if isinstance(leaf, list) or (and_numbers and _is_plain(leaf)):
            place = f"Leaf {leaf_name(path)} of {what}" if path else what.capitalize()
            raise UserError(
                f"{place} is {kind_of(leaf)}, not an array. Convert it with numpy.asarray."
            )


def _is_plain(value: object) -> bool:
    """Returns whether a value is a number or a text of Python, not of NumPy."""
    return isinstance(value, int | float | complex | str | bytes) and not hasattr(value, "dtype")


def _count(ensemble: PyTree) -> int:
    """Returns the length of the members axis, which all leaves share."""
    named = jax.tree_util.tree_leaves_with_path(ensemble)
    if not named:
        raise UserError(
            "The ensemble has no arrays, such as a model state (), so its members cannot be told "
            "apart. Use it as it is."
        )
    lengths = {leaf_name(path): (*np.shape(leaf)[:1],) for path, leaf in named}
    if len({*lengths.values()}) != 1 or () in lengths.values():
        listed = ", ".join(f"{[*shape]} in leaf {name}" for name, shape in lengths.items())
        raise UserError(
            f"The leaves of the ensemble have different lengths along the members axis: {listed}. "
            "Make ensembles with stack_members."
        )
    return next(iter(lengths.values()))[0]


def leaf_name(path: KeyPath) -> str:
    """Returns the name of a leaf, such as `['w']`, from its path."""
    return jax.tree_util.keystr(path) or "(the whole)"


def leaf_type(leaf: Leaf) -> str:
    """Returns the type and shape of an array or a number, such as `float32[3, 2]`."""
    return f"{jnp.result_type(leaf)}{list(np.shape(leaf))}"


def differing(types: dict[str, str], others: dict[str, str]) -> list[str]:
    """Returns the names whose values differ between two dicts, or that one of them lacks."""
    return [name for name in {**types, **others} if types.get(name) != others.get(name)]


def leaf_types(tree: PyTree) -> dict[str, str]:
    """Returns the type and shape of each leaf of a pytree, by the leaf's name.

    >>> leaf_types({"w": np.zeros((3, 2)), "b": 0})
    {"['b']": 'int32[]', "['w']": 'float32[3, 2]'}
    """
    return {
        leaf_name(path): leaf_type(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def described(tree: PyTree) -> str:
    """Returns the leaves of a pytree with their names, types and shapes, for messages.

    >>> described((np.zeros(3), np.zeros((3, 2), np.uint8)))
    '[0] float32[3], [1] uint8[3, 2]'
    """
    if hasattr(tree, "shape"):
        return leaf_type(tree)
    return ", ".join(f"{name} {kind}" for name, kind in leaf_types(tree).items()) or "no arrays"


def held_array(leaf: Leaf, where: object, way_out: str | None = None) -> np.ndarray:
    """Returns a NumPy array in the type in which JAX holds it; for typed keys see `host_array`."""
    array = host_array(leaf)
    if generator_of(array.dtype):
        return array
    if not jnp.issubdtype(array.dtype, jnp.number) and array.dtype != bool:
        way_out = way_out or "Convert it to an array of numbers, or leave it out."
        raise UserError(f"{where} has the type {array.dtype}, which holds no numbers. {way_out}")
    dtype = held_dtype(array.dtype)
    return array if dtype == array.dtype else narrowed(array, dtype, where)
