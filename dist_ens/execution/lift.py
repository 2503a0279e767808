"""The lift: it turns a function of one member into a function of all members, over the mesh."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from dist_ens.execution.apply import lowered, over_members
from dist_ens.execution.heuristics import ONE_BY_ONE, by_rule
from dist_ens.execution.loop import Loop, of_one_state
from dist_ens.execution.spec import Execution
from dist_ens.ground.errors import UserError
from dist_ens.ground.state import as_held
from dist_ens.ground.types import PyTree, Specs, Tree
from dist_ens.layout import (
    DATA,
    ENSEMBLE,
    REPLICATED,
    Layout,
    axis_of,
    check_lengths,
    copy_of_numpy,
    in_turn,
    is_spec,
)
from dist_ens.layout.specs import members_axes, named_specs


def lift(
    fn: Callable[..., Tree],
    *,
    layout: Layout,
    in_specs: Sequence[Specs],
    out_specs: Specs = "members",
    execution: str = "vmap",
    donate_argnums: int | Sequence[int] = (),
) -> "Lifted":
    """Returns the function of all members of an ensemble, made from a function of one member.

    The result is `jit(shard_map(execution(fn)))`. `fn` is written for one member and the whole
    batch. Each row of the mesh runs it for the members that the row holds. The compiler divides
    the batch over the columns of a row, and members do not communicate.

    Args:
        fn: Function of one member. Its arguments and results are any pytrees of arrays. It is
            given its own state without the members axis, the whole batch, and shared arguments
            unchanged.
        layout: Layout of the members and the data.
        in_specs: Spec of each argument: "members" ([members, ...]), "batch" ([batch, ...], the
            same for all members), "member_batch" ([members, batch, ...]) or "shared" ([...]), or
            a tree prefix of these. With a data axis of 1, a batch may be any pytree of arrays.
        out_specs: Specs of the results: "members" or "member_batch", or a tree prefix of these.
        execution: Execution of the members of a device, such as "vmap", "unroll", "map",
            "chunk:4", "loop" or "unroll+canonical+masks". "auto" takes the first candidate for the
            operations of `fn`.
        donate_argnums: Positions of donated arguments, whose memory the results may reuse. They
            must not be used again.

    Returns:
        A function of global arrays. It moves arguments onto the mesh if they are not on it.

    Raises:
        UserError: If a spec or the execution is unknown. The returned function raises it if an
            argument has another number of members, or if the length of a leaf of a batch is not a
            multiple of the data axis.

    >>> import numpy as np
    >>> layout = Layout.make(4, devices=jax.devices()[:2])
    >>> scale = lift(lambda w, x: (w * x).sum(), layout=layout, in_specs=("members", "shared"))
    >>> scale(np.arange(4.0, dtype=np.float32), np.ones(3, np.float32))
    Array([0., 3., 6., 9.], dtype=float32)
    """
    if isinstance(in_specs, str) or not isinstance(in_specs, tuple | list):
        raise UserError(
            f"in_specs is {in_specs!r}. Give a tuple with one spec for each argument of the "
            'function, such as ("members", "batch", "shared").'
        )
    out_specs = named_specs(out_specs)
    for spec in jax.tree.leaves(out_specs, is_leaf=is_spec):
        if axis_of(spec, ENSEMBLE) is None:
            raise UserError(
                f"The spec {spec} of a result has no members axis, and every member has its own "
                "result. Use 'members' or 'member_batch'."
            )
    parsed = Execution.parse(execution)
    if parsed.steps is not None:
        raise UserError(
            f"The execution {execution!r} says how to run several steps, and a lifted function "
            f"is one step. Leave {parsed.steps!r} out."
        )
    donated = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
    for number in donated:
        if REPLICATED in jax.tree.leaves(named_specs(in_specs[number]), is_leaf=is_spec):
            raise UserError(
                f"Argument {number} is donated, and its spec is 'shared'. The next call needs what "
                "members share. Leave it out of donate_argnums."
            )
    return Lifted(
        fn,
        layout=layout,
        in_specs=named_specs(tuple(in_specs)),
        out_specs=out_specs,
        execution=parsed,
        donate_argnums=donated,
    )


def sharded(
    fn: Callable[..., Tree],
    layout: Layout,
    in_specs: tuple[Specs, ...],
    out_specs: Specs,
    execution: Execution,
) -> Callable[..., Tree]:
    """Returns the function of all members, not yet jitted; see `lift`."""
    of_device = over_members(fn, execution, members_axes(in_specs), members_axes(out_specs))
    return layout.map_rows(of_device, in_specs=in_specs, out_specs=out_specs)


def of_all_members(
    fn: Callable[..., Tree],
    layout: Layout,
    in_specs: tuple[Specs, ...],
    out_specs: Specs,
    execution: Execution,
) -> Callable[..., Tree]:
    """Returns the function of all members with its operations lowered, not yet jitted."""

    def of_all(*args: PyTree) -> Tree:
        plain = sharded(fn, layout, in_specs, out_specs, ONE_BY_ONE)
        found = by_rule(execution, layout, lambda: jax.make_jaxpr(plain)(*args))
        return sharded(lowered(fn, found, layout), layout, in_specs, out_specs, found)(*args)

    return of_all


class Lifted:
    """A function of all members, made by `lift`."""

    def __init__(
        self,
        fn: Callable[..., PyTree],
        *,
        layout: Layout,
        in_specs: tuple[Specs, ...],
        out_specs: Specs,
        execution: Execution,
        donate_argnums: tuple[int, ...] = (),
        names: Sequence[str] | None = None,
    ) -> None:
        self._layout, self._in_specs, self._out_specs = layout, in_specs, out_specs
        self._names = names or [f"Argument {number}" for number in range(len(in_specs))]

        def program_on(
            layout: Layout, of_members: Execution, *, of_one: bool = False
        ) -> Callable[..., PyTree]:
            program = of_all_members(fn, layout, in_specs, out_specs, of_members)

            def checked(*args: PyTree) -> PyTree:
                # Shapes are known when a call is traced, so that they are checked once for all.
                for arg, spec, name in zip(args, in_specs, self._names, strict=True):
                    check_lengths(layout, arg, spec, name)
                return program(*args)

            of_layout = of_one_state(checked) if of_one else checked
            return in_turn(layout, jax.jit(of_layout, donate_argnums=donate_argnums))

        # The programs of `loop` see one member each, so that the arguments are checked before.
        is_loop = execution.members == "loop" or layout.model_axis > 1
        self._place = layout.placed if is_loop else self._as_arguments
        if is_loop:
            alone = dataclasses.replace(execution, members="unroll")
            self._program: Any = Loop(
                layout,
                in_specs,
                out_specs,
                lambda of_row, of_one: program_on(of_row, alone, of_one=of_one),
                in_place=donate_argnums == (0,) and _is_state(in_specs[0], out_specs),
            )
        else:
            self._program = program_on(layout, execution)

    def __call__(self, *args: PyTree) -> PyTree:
        """Returns the results of all members; see `lift`."""
        return self._program(*self._placed(args, self._place))

    def lower(self, *args: PyTree) -> jax.stages.Lowered:
        """Returns the lowered program, as `jax.jit(f).lower` does; `loop` has none."""
        return self._program.lower(*self._placed(args, self._place))

    def _as_arguments(self, tree: PyTree, specs: Specs, where: str) -> PyTree:
        """Returns an argument of the program as `Layout.placed` does, or as arrays anywhere."""
        if self._layout.mesh.size > 1:
            return self._layout.placed(tree, specs, where)
        # A NumPy array is copied, since it may share its memory with the array on a CPU.
        return jax.tree.map(copy_of_numpy, as_held(tree, where))

    def _placed(self, args: tuple[PyTree, ...], place: Callable[..., PyTree]) -> list[PyTree]:
        if len(args) != len(self._in_specs):
            raise UserError(
                f"The lifted function takes as many arguments as in_specs has specs, "
                f"{len(self._in_specs)}: got {len(args)}. Give one argument for each spec."
            )
        return [
            place(arg, spec, name)
            for arg, spec, name in zip(args, self._in_specs, self._names, strict=True)
        ]


def _is_state(in_spec: Specs, out_specs: Specs) -> bool:
    """Returns whether the first result has the spec of the first argument, and no data axis."""
    first = out_specs[0] if type(out_specs) is tuple else out_specs
    return is_spec(in_spec) and is_spec(first) and in_spec == first and DATA not in tuple(first)
