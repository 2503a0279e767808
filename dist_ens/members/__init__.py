"""Members: a member is one network, as two pure functions.

    init(key, inputs)                               -> params, model_state
    apply(params, model_state, inputs, key, train)  -> outputs, model_state

`as_member` makes a member from a network of flax.linen, flax.nnx, equinox or Haiku, from plain
functions, or from a class of your own.

- `inputs` is what the network is called with, any pytree with leaves `[batch, ...]`. In training,
  `init` and `apply` are given `batch["inputs"]`, or the whole batch if it is no dict with this key.
  `Ensemble.predict` passes on the inputs that it is given. The call of a module with several inputs
  takes a tuple, or a dict by the names of its arguments.
- `outputs` is any pytree. The built-in losses take one array, such as logits
  `[batch, ..., classes]`.
- `params` is any pytree of floating-point arrays. The gradient has its structure.
- `model_state` is any pytree of the other arrays that a network keeps from step to step, such as
  the running statistics of BatchNorm; `()` if there are none.
- `key` is a JAX PRNG key, or None. It differs between steps and members.
- `train` is a Python bool. If it is False, `apply` returns the model state unchanged. If `key` is
  None too, nothing is random. With a key, dropout is on, as Monte Carlo dropout needs it.
- A prediction calls `apply` without a key. If the network raises an error, it is called with the
  member's own key and without dropout, as a variational autoencoder needs it.

A member knows neither the ensemble nor the devices. It sees the whole batch, also where several
devices share it. So batch statistics need no axis of the mesh. The axis name `"batch"` of equinox's
`BatchNorm` is that of the examples.

`as_member` chooses one of these adapters, which can also be called directly:

    from_functions            `init(key)` and `apply(params, inputs)` for a whole batch
    from_example_functions    `init(key)` and `apply(params, x)` for a single example
    from_linen                a `flax.linen` module
    from_nnx                  a function that makes a `flax.nnx` module
    from_equinox              a function that makes an `equinox` module
    from_haiku                a Haiku transform
    from_pytree               a function that makes an instance of your own class
"""

from dist_ens.members.adapt import as_member
from dist_ens.members.equinox import from_equinox
from dist_ens.members.functions import from_example_functions, from_functions, from_pytree
from dist_ens.members.haiku import from_haiku
from dist_ens.members.linen import from_linen
from dist_ens.members.member import (
    Member,
    rematerialized,
    with_compute_dtype,
    with_normalized_inputs,
)
from dist_ens.members.nnx import from_nnx

__all__ = [
    "Member",
    "as_member",
    "from_equinox",
    "from_example_functions",
    "from_functions",
    "from_haiku",
    "from_linen",
    "from_nnx",
    "from_pytree",
    "rematerialized",
    "with_compute_dtype",
    "with_normalized_inputs",
]
