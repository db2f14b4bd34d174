"""The hash of weights depends on names, dtypes, shapes and values, and on nothing else."""

from __future__ import annotations

import hashlib
import struct

import torch

from dtrain.checkpoint import weights_sha256


def test_hash_is_that_of_the_documented_bytes() -> None:
    weights = {"b": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "a": torch.tensor(7)}
    expected = hashlib.sha256(
        b"a\0int64\0\0"
        + struct.pack("<q", 7)
        + b"b\0float32\x002,2\0"
        + struct.pack("<4f", 1, 2, 3, 4)
    )
    assert weights_sha256(weights) == expected.hexdigest()


def test_order_strides_and_autograd_do_not_matter() -> None:
    x = torch.randn(5, 3)
    strided = torch.randn(3, 10)[:, ::2].t()
    strided.copy_(x)
    assert not strided.is_contiguous()
    first = weights_sha256({"x": x, "y": torch.zeros(2, dtype=torch.bfloat16)})
    second = weights_sha256(
        {"y": torch.zeros(2, dtype=torch.bfloat16), "x": torch.nn.Parameter(strided)}
    )
    assert first == second


def test_name_dtype_shape_and_each_bit_matter() -> None:
    x = torch.arange(6.0)
    variants = [
        {"x": x},
        {"y": x},
        {"x": x.reshape(2, 3)},
        {"x": x.view(torch.int32)},
        {"x": x.bfloat16()},
        {"x": torch.cat([x[:5], torch.nextafter(x[5:], torch.tensor(9.0))])},
        {"x": x, "empty": torch.zeros(0)},
    ]
    assert len({weights_sha256(v) for v in variants}) == len(variants)
    assert weights_sha256({"x": torch.tensor(0.0)}) != weights_sha256({"x": torch.tensor(-0.0)})
