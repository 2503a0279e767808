"""What a member is: one network, as two pure functions.

    init(key, inputs)                               -> params, model_state
    apply(params, model_state, inputs, key, train)  -> outputs, model_state

`inputs` is one batch, `[batch, ...]`; `outputs` are the logits, `[batch, ..., classes]`. `params`
is any pytree of floating-point arrays: what the gradient is taken of, and the gradient has its
structure. `model_state` is any pytree of what else a network carries from step to step, such as
the running statistics of BatchNorm; `()` where there is nothing. `key` is a JAX PRNG key, a new one
for every step, member and part of the data; `train` is a Python bool, and where it is False `apply`
returns the state as it came. There the key is None, and nothing is random; or it is a key, and what
is drawn in training is drawn here too, as Monte Carlo dropout wants it.

A member knows nothing of the ensemble. A layer that takes statistics over the batch takes them over
the *global* batch if it averages over the mesh axis `"data"`: `nn.BatchNorm(axis_name="data")` in
flax, `eqx.nn.BatchNorm(axis_name=("batch", "data"))` in equinox.

Every column of the mesh applies the member to its own part of the batch. Afterwards floating-point
model state is averaged over the columns; anything else, such as a count of type int32, must come
out the same in every column, so a network that counts examples sums over the columns itself, by
`jax.lax.psum(count, "data")`. The first update is checked for this.

The adapters make a member of what people have:

    from_functions            plain `init(key)` and `apply(params, inputs)` for a whole batch
    from_example_functions    the same, with an `apply` written for a single example
    from_linen                a `flax.linen` module
    from_nnx                  a function that makes a `flax.nnx` module
    from_equinox              a function that makes an `equinox` module
    from_pytree               a class of your own, registered as a PyTree
"""

from dist_ens.members.equinox import from_equinox
from dist_ens.members.functions import from_example_functions, from_functions
from dist_ens.members.linen import from_linen
from dist_ens.members.member import (
    Member,
    check_member,
    check_modes,
    rematerialized,
    require_member,
    with_compute_dtype,
    with_normalized_inputs,
)
from dist_ens.members.nnx import from_nnx
from dist_ens.members.pytree import from_pytree

__all__ = [
    "Member",
    "check_member",
    "check_modes",
    "from_equinox",
    "from_example_functions",
    "from_functions",
    "from_linen",
    "from_nnx",
    "from_pytree",
    "rematerialized",
    "require_member",
    "with_compute_dtype",
    "with_normalized_inputs",
]
