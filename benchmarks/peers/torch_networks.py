"""The workloads' networks in PyTorch, each built from the parameters of its JAX member.

So both networks have the same sizes and the same initial parameters. They can also be compared leaf
by leaf: a network built from a JAX member's gradients holds them as its parameters, in PyTorch's
order and layouts.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads import Workload
from dist_ens.losses import gaussian_nll, softmax_cross_entropy

_VARIANCE_FLOOR = 1e-6


def network_of(workload: Workload, params: Any) -> nn.Module:
    """Returns the network of a workload, for batches of inputs that are not yet scaled.

    Args:
        workload: Workload that names the network and the scale of its inputs.
        params: Parameters of one JAX member.
    """
    networks: dict[str, Callable[[Any], nn.Module]] = {
        "mlp": _Mlp,
        "convolutional": _ConvNet,
        "resnet8": _ResNet8,
        "transformer": _Transformer,
    }
    bare = networks[workload.network](params)
    scales = workload.mean != (0.0,) or workload.std != (1.0,)
    return nn.Sequential(_Scaled(workload.mean, workload.std), bare) if scales else bare


def loss_of(workload: Workload) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns the loss of a workload: a function of outputs and labels, the mean over a batch."""
    return {gaussian_nll: _gaussian_nll, softmax_cross_entropy: _cross_entropy}[workload.loss]


def _gaussian_nll(outputs: Tensor, targets: Tensor) -> Tensor:
    variance = F.softplus(outputs[..., 1]) + _VARIANCE_FLOOR
    distance = (targets - outputs[..., 0]) ** 2 / variance
    return 0.5 * (variance.log() + distance + math.log(2 * math.pi)).mean()


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


class _Scaled(nn.Module):
    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        # They are not buffers, because buffers would be stacked for all members.
        self.mean, self.std = torch.tensor(mean), torch.tensor(std)

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() - self.mean) / self.std


class _Mlp(nn.Sequential):
    def __init__(self, params: list[Mapping[str, Any]]) -> None:
        layers: list[nn.Module] = [nn.Flatten()]
        for layer in params:
            layers += [_dense({"kernel": layer["w"], "bias": layer["b"]}), nn.ReLU()]
        super().__init__(*layers[:-1])


class _ConvNet(nn.Module):
    def __init__(self, params: Mapping[str, Any]) -> None:
        super().__init__()
        self.conv1, self.conv2 = (_conv(params[f"Conv_{i}"], padding=1) for i in range(2))
        self.dense1, self.dense2 = (_dense(params[f"Dense_{i}"]) for i in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None]
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = x.permute(0, 2, 3, 1).flatten(1)  # The JAX member's dense layer has this order.
        return self.dense2(F.relu(self.dense1(x)))


class _BasicBlock(nn.Module):
    def __init__(self, params: Mapping[str, Any]) -> None:
        super().__init__()
        self.projects = "Conv_2" in params
        stride = 2 if self.projects and _fan_out(params["Conv_0"]) > 16 else 1
        # With stride 2 and an even image, JAX's padding "SAME" is one pixel at the far edges only.
        self.far_edges = (0, 1, 0, 1) if stride == 2 else None
        self.conv1 = _conv(params["Conv_0"], stride=stride, padding=1 if stride == 1 else 0)
        self.norm1 = _batch_norm(params["BatchNorm_0"])
        self.conv2 = _conv(params["Conv_1"], padding=1)
        self.norm2 = _batch_norm(params["BatchNorm_1"])
        if self.projects:
            self.conv3 = _conv(params["Conv_2"], stride=stride)
            self.norm3 = _batch_norm(params["BatchNorm_2"])

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(x if self.far_edges is None else F.pad(x, self.far_edges))
        y = self.norm2(self.conv2(F.relu(self.norm1(y))))
        if self.projects:
            x = self.norm3(self.conv3(x))
        return F.relu(x + y)


class _ResNet8(nn.Module):
    def __init__(self, params: Mapping[str, Any]) -> None:
        super().__init__()
        self.stem = _conv(params["Conv_0"], padding=1)
        self.norm = _batch_norm(params["BatchNorm_0"])
        self.blocks = nn.Sequential(*(_BasicBlock(params[f"_BasicBlock_{i}"]) for i in range(3)))
        self.dense = _dense(params["Dense_0"])

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x.permute(0, 3, 1, 2))))
        return self.dense(self.blocks(x).mean((2, 3)))


class _Block(nn.Module):
    def __init__(self, params: Mapping[str, Any]) -> None:
        super().__init__()
        attention = params["MultiHeadDotProductAttention_0"]
        width, self.num_heads, head_size = np.shape(attention["query"]["kernel"])
        parts = [attention[part] for part in ("query", "key", "value")]
        self.norm1, self.norm2 = (_layer_norm(params[f"LayerNorm_{i}"]) for i in range(2))
        self.qkv = _dense(
            {
                "kernel": np.concatenate([_matrix(p["kernel"], width) for p in parts], axis=1),
                "bias": np.concatenate([np.ravel(p["bias"]) for p in parts]),
            }
        )
        self.out = _dense(
            {
                "kernel": _matrix(attention["out"]["kernel"], self.num_heads * head_size),
                "bias": attention["out"]["bias"],
            }
        )
        self.dense1, self.dense2 = (_dense(params[f"Dense_{i}"]) for i in range(2))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.dense2(F.gelu(self.dense1(self.norm2(x)), approximate="tanh"))


class _Transformer(nn.Module):
    def __init__(self, params: Mapping[str, Any]) -> None:
        super().__init__()
        self.embed = nn.Embedding.from_pretrained(
            _tensor(params["Embed_0"]["embedding"]), freeze=False
        )
        self.position = nn.Parameter(_tensor(params["position"]))
        blocks = sum(name.startswith("_Block_") for name in params)
        self.blocks = nn.Sequential(*(_Block(params[f"_Block_{i}"]) for i in range(blocks)))
        self.norm = _layer_norm(params["LayerNorm_0"])
        self.dense = _dense(params["Dense_0"])

    def forward(self, tokens: Tensor) -> Tensor:
        return self.dense(self.norm(self.blocks(self.embed(tokens) + self.position)))


def _dense(params: Mapping[str, Any]) -> nn.Linear:
    layer = nn.Linear(*np.shape(params["kernel"]))
    return _filled(layer, np.transpose(params["kernel"]), params["bias"])


def _conv(params: Mapping[str, Any], stride: int = 1, padding: int = 0) -> nn.Conv2d:
    rows, columns, fan_in, fan_out = np.shape(params["kernel"])
    layer = nn.Conv2d(fan_in, fan_out, (rows, columns), stride, padding, bias="bias" in params)
    return _filled(layer, np.transpose(params["kernel"], (3, 2, 0, 1)), params.get("bias"))


def _batch_norm(params: Mapping[str, Any]) -> nn.BatchNorm2d:
    return _filled(nn.BatchNorm2d(len(params["scale"])), params["scale"], params["bias"])


def _layer_norm(params: Mapping[str, Any]) -> nn.LayerNorm:
    return _filled(nn.LayerNorm(len(params["scale"]), eps=1e-6), params["scale"], params["bias"])


def _filled(layer: Any, weight: Any, bias: Any) -> Any:
    layer.weight = nn.Parameter(_tensor(weight))
    if bias is not None:
        layer.bias = nn.Parameter(_tensor(bias))
    return layer


def _matrix(kernel: Any, fan_in: int) -> np.ndarray:
    return np.reshape(kernel, (fan_in, -1))


def _fan_out(params: Mapping[str, Any]) -> int:
    return np.shape(params["kernel"])[-1]


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(np.array(array, order="C"))
