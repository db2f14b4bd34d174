"""Archives are those of ``torch.save``, byte for byte."""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor

from dtrain.checkpoint.archives import Archives, without_crc32

_DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool)


def written(tensor: Tensor) -> bytes:
    stream = io.BytesIO()
    without_crc32(lambda: torch.save(tensor, stream))
    return stream.getvalue()


@pytest.mark.parametrize("shape", [(), (1,), (0, 4), (3, 5), (7, 300, 2)])
def test_the_same_bytes_as_of_torch_save(shape: tuple[int, ...]) -> None:
    archives = Archives()
    tensors = [(torch.rand(shape) * 9).to(dtype) for dtype in (*_DTYPES, torch.complex64)]
    archives.prepare(tensors)
    for tensor in tensors:
        assert b"".join(archives.pieces(tensor)) == written(tensor)


def test_views_and_parameters_are_written_by_themselves() -> None:
    whole = torch.randn(6, 8, dtype=torch.complex64)
    archives = Archives()
    for tensor in (whole[2:4], whole.t(), whole.conj(), torch.nn.Parameter(whole.real[:, :3])):
        archives.prepare([tensor])
        data = b"".join(archives.pieces(tensor))
        found = torch.load(io.BytesIO(data), weights_only=True)
        assert torch.equal(found, tensor)
        assert len(data) < 2000 + tensor.nbytes


def test_settings_of_the_process_stay_as_they_are() -> None:
    before = torch.serialization.get_crc32_options()
    Archives().prepare([torch.ones(3)])
    assert torch.serialization.get_crc32_options() == before


def test_a_torch_that_writes_otherwise_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = torch.save
    monkeypatch.setattr(torch, "save", lambda tensor, to: genuine(tensor.clone(), to))
    with pytest.raises(RuntimeError, match="writes tensors otherwise"):
        Archives().prepare([torch.ones(3)])
