"""Model, loss, score, sliding window, against formulas written out here."""
from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unet3d import evaluate, losses, spec
from unet3d.data import Case
from unet3d.model import UNet3D


def parameter_count(filters, inputs=1, classes=3):
    """The specified network's weights, counted by hand."""
    def block(a, b):
        return 27 * a * b + 27 * b * b + 4 * b  # two convolutions, two affine norms

    total = block(inputs, filters[0])
    for a, b in zip(filters, [*filters[1:], filters[-1]]):
        total += block(a, b)
    wide = [filters[-1], *reversed(filters[1:])]
    for a, b in zip(wide, reversed(filters)):
        total += 8 * a * b + b + block(2 * b, b)
    return total + filters[0] * classes + classes


@pytest.mark.parametrize("filters", [(2, 4), (4, 8, 16), spec.PRESETS["mlperf"].filters])
def test_parameter_count(filters):
    with torch.device("meta"):
        model = UNet3D(filters)
    assert sum(p.numel() for p in model.parameters()) == parameter_count(filters)


def test_reference_size():
    assert parameter_count((32, 64, 128, 256, 320)) == 31_190_243


@pytest.mark.parametrize("shape", [(8, 8, 8), (4, 8, 12)])
def test_shapes(shape):
    model = UNet3D((2, 4))
    assert model.divisor == 4
    assert model(torch.randn(2, 1, *shape)).shape == (2, 3, *shape)


def test_no_bias_where_normalised():
    for name, module in UNet3D((2, 4)).named_modules():
        if isinstance(module, torch.nn.Conv3d):
            assert (module.bias is None) == (module.kernel_size == (3, 3, 3)), name


def test_loss_by_hand():
    logits = torch.randn(2, 3, 2, 2, 2, generator=torch.Generator().manual_seed(0))
    label = torch.randint(0, 3, (2, 1, 2, 2, 2), generator=torch.Generator().manual_seed(1))
    p = logits.softmax(1).numpy().astype(np.float64)
    t = np.stack([(label[:, 0] == c).numpy() for c in range(3)], 1)
    entropy = -np.log((p * t).sum(1)).mean()
    dice = [(2 * (p[n, c] * t[n, c]).sum() + 1e-6) / (p[n, c].sum() + t[n, c].sum() + 1e-6)
            for n in range(2) for c in (1, 2)]
    expected = ((1 - np.mean(dice)) + entropy) / 2
    assert losses.dice_ce_loss(logits, label).item() == pytest.approx(expected, rel=1e-5)


def test_score_by_hand():
    label = torch.tensor([0, 1, 1, 1, 0, 0, 0, 0]).reshape(1, 1, 2, 2, 2)
    guess = torch.tensor([1, 1, 1, 0, 0, 0, 0, 0]).reshape(1, 1, 2, 2, 2)
    logits = torch.nn.functional.one_hot(guess[:, 0], 3).movedim(-1, 1).float()
    # Kidney: 2 common of 3 and 3. Tumour: absent from both, so 1 by the smoothing.
    assert losses.dice_score(logits, label).tolist() == pytest.approx([2 / 3, 1.0])


def test_gaussian_weights():
    weights = evaluate.gaussian_weights((8, 8, 8))
    assert weights.shape == (8, 8, 8) and weights.max() == 1
    z = np.arange(8) - 3.5
    one = np.exp(-0.5 * z ** 2)  # sigma 8 / 8
    cube = np.cbrt(np.einsum("i,j,k->ijk", one, one, one))
    np.testing.assert_allclose(weights.numpy(), cube / cube.max(), rtol=1e-5)
    assert (evaluate.gaussian_weights((128, 128, 128)) > 0).all()


@pytest.mark.parametrize("size, expected", [
    (128, (0, 0, 0, 0)), (192, (0, 0, 0, 0)), (159, (15, 16, 0, 0)),
    (160, (0, 0, 16, 16)), (161, (0, 0, 15, 16)), (255, (0, 0, 0, 1)),
    (100, (0, 0, 14, 14)), (70, (0, 0, 29, 29))])
def test_fit_axis(size, expected):
    """Patch 128, stride 64: a remainder under 32 is trimmed, else padded."""
    assert evaluate.fit_axis(size, 128, 64) == expected


@given(half=st.integers(1, 64), size=st.integers(1, 400))
def test_half_overlapping_windows_cover_the_remainder(half, size):
    """As specified for 128 and 64: with strides of half a patch the patch itself leaves no
    remainder."""
    rest = size % half
    trimmed = rest if rest < half // 2 and size > 2 * half else 0
    padded = max(-(size - trimmed) % half, 2 * half - size)
    assert evaluate.fit_axis(size, 2 * half, half) == (
        trimmed // 2, trimmed - trimmed // 2, padded // 2, padded - padded // 2)


def voxelwise(x):
    """A trivial model: its output for a voxel depends on that voxel alone."""
    return torch.cat((x, x ** 2, -x), dim=1)


@pytest.mark.parametrize("shape", [(8, 8, 8), (16, 12, 8), (9, 21, 15), (3, 30, 10)])
def test_sliding_window_equals_the_whole_volume(shape):
    image = torch.randn(1, 1, *shape, generator=torch.Generator().manual_seed(0))
    logits, kept = evaluate.sliding_window(voxelwise, image, (8, 8, 8))
    torch.testing.assert_close(logits, voxelwise(image[(..., *kept)]))
    for axis, size in zip(kept, shape):
        rest = size % 4
        assert size - (axis.stop - axis.start) == (rest if rest < 2 and size > 8 else 0)


@settings(deadline=None)
@given(patch=st.tuples(*[st.integers(1, 9)] * 3), overlap=st.floats(0, 0.95),
       shape=st.tuples(*[st.integers(1, 20)] * 3))
def test_windows_cover_every_voxel_that_is_kept(patch, overlap, shape):
    """Whether or not the stride divides the patch, and under half a stride is cut off."""
    image = torch.randn(1, 1, *shape, generator=torch.Generator().manual_seed(0))
    logits, kept = evaluate.sliding_window(voxelwise, image, patch, overlap)
    torch.testing.assert_close(logits, voxelwise(image[(..., *kept)]))
    for axis, size, length in zip(kept, shape, patch):
        assert axis.stop - axis.start >= min(size, length)
        assert size - (axis.stop - axis.start) < max(1, int(length * (1 - overlap)) / 2)


def test_sliding_window_pads_with_the_given_value():
    seen = []

    def model(x):
        seen.append(x)
        return voxelwise(x)

    evaluate.sliding_window(model, torch.zeros(1, 1, 8, 8, 6), (8, 8, 8))
    window = seen[0][0, 0]
    assert (window[..., 0] == -2.2).all() and (window[..., -1] == -2.2).all()
    assert (window[..., 1:-1] == 0).all()


def test_evaluation_weighs_volumes_equally(tmp_path, monkeypatch):
    """One volume found, one missed: the mean is a half, whatever their sizes."""
    cases = []
    for number, size in enumerate((8, 16)):
        label = np.zeros((1, size, size, size), np.uint8)
        label[0, :4], label[0, 4:6] = 1, 2
        image = label.astype(np.float32) if number == 0 else np.zeros(label.shape, np.float32)
        paths = [tmp_path / f"{number}_{k}.npy" for k in "xy"]
        for path, array in zip(paths, (image, label)):
            np.save(path, array)
        cases.append(Case(str(number), *paths, 0))

    class Reader(torch.nn.Module):
        def forward(self, x):
            return torch.cat([-(x - c).abs() for c in range(3)], dim=1)

    scores = evaluate.evaluate(Reader(), cases, (8, 8, 8), torch.device("cpu"),
                               progress=False)
    assert scores["volumes"] == 2
    assert scores["kidney"] == pytest.approx(0.5, abs=1e-3)
    assert scores["mean_dice"] == pytest.approx(0.5, abs=1e-3)

    # Three volumes over two ranks: the ranks' sum equals the result of one process.
    cases.append(cases[0])
    alone = evaluate.evaluate(Reader(), cases, (8, 8, 8), torch.device("cpu"), progress=False)
    totals = []
    monkeypatch.setattr(evaluate.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(evaluate.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(evaluate.distributed, "all_reduce", lambda t: totals.append(t.clone()))
    for rank in range(2):
        monkeypatch.setattr(evaluate.distributed, "get_rank", lambda rank=rank: rank)
        evaluate.evaluate(Reader(), cases, (8, 8, 8), torch.device("cpu"), progress=False)
    assert [total[-1] for total in totals] == [2, 1]
    kidney, tumour, volumes = sum(totals).tolist()
    assert [kidney / volumes, tumour / volumes] == [alone["kidney"], alone["tumour"]]
