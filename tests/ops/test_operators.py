"""Each operator, alone and fused, against NumPy and SciPy with the same draws."""
from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minato import ops

from . import reference
from .conftest import make_pair

KEYS = [(n, (1 << 64) - 1) for n in range(40)]
SHAPE = (14, 17, 19)


def same(got, want) -> None:
    """Equal in dtype, shape and every bit."""
    want = np.ascontiguousarray(want)
    assert got.dtype == want.dtype and got.shape == want.shape
    assert got.flags.c_contiguous
    np.testing.assert_array_equal(got.reshape(-1).view(np.uint8), want.reshape(-1).view(np.uint8))


def both(got, want) -> None:
    same(got[0], want[0])
    same(got[1], want[1])


@pytest.fixture
def pair():
    return make_pair(1, SHAPE)


@pytest.mark.parametrize("include_last", [True, False])
def test_rand_crop(pair, include_last):
    operator = ops.RandCrop((5, 17, 8), include_last=include_last)
    for key in KEYS:
        want = reference.rand_crop(*pair, reference.Draws(key, 0), (5, 17, 8), include_last)
        both(operator(*pair, key=key), want)


@pytest.mark.parametrize("include_last", [True, False])
@pytest.mark.parametrize("patch", [(3, 3, 3), (10, 9, 12), SHAPE, (14, 2, 19)])
@pytest.mark.parametrize("foreground", [0.0, 0.4, 1.0])
def test_rand_balanced_crop(patch, foreground, include_last):
    operator = ops.RandBalancedCrop(patch, foreground, include_last)
    for key in KEYS:
        image, label = make_pair(key[0], SHAPE, blobs=key[0] % 5)
        want = reference.rand_balanced_crop(image, label, reference.Draws(key, 0), patch,
                                            foreground, include_last)
        both(operator(image, label, key=key), want)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.tuples(*[st.integers(1, 12)] * 3),
       st.tuples(*[st.integers(1, 12)] * 3), st.integers(0, 2**64 - 1))
def test_balanced_crop_of_any_size(seed, shape, patch, key):
    shape = tuple(max(s, p) for s, p in zip(shape, patch))
    image, label = make_pair(seed, shape)
    draws = reference.Draws((key, (1 << 64) - 1), 0)
    both(ops.RandBalancedCrop(patch, 1.0)(image, label, key=key),
         reference.rand_balanced_crop(image, label, draws, patch, 1.0))


def test_crops_reach_every_start_and_only_those():
    image = np.arange(5, dtype=np.float32).reshape(1, 1, 1, 5)
    label = np.zeros((1, 1, 1, 5), np.uint8)
    for include_last, starts in [(True, {0, 1, 2, 3}), (False, {0, 1, 2})]:
        for operator in (ops.RandCrop((1, 1, 2), include_last),
                         ops.RandBalancedCrop((1, 1, 2), 0.4, include_last)):
            firsts = [operator(image, label, key=k)[0][0, 0, 0, 0] for k in range(400)]
            values, counts = np.unique(firsts, return_counts=True)
            assert set(values) == starts
            assert counts.min() > 0.6 * len(firsts) / len(starts)


def test_balanced_crop_is_as_often_foreground_as_asked():
    image = np.zeros((1, 1, 1, 1000), np.float32)
    label = np.zeros((1, 1, 1, 1000), np.uint8)
    label[..., 990] = 1
    hits = sum(ops.RandBalancedCrop(1, 0.4)(image, label, key=k)[1].any() for k in range(2000))
    assert 0.35 < hits / 2000 < 0.45


def test_classes_and_components_are_equally_likely():
    image = np.zeros((1, 1, 1, 60), np.float32)
    label = np.zeros((1, 1, 1, 60), np.uint8)
    label[..., 0:5], label[..., 10:14], label[..., 20:23], label[..., 50] = 1, 1, 1, 2
    image[...] = np.arange(60)
    firsts = np.array([ops.RandBalancedCrop((1, 1, 1), 1.0)(image, label, key=k)[0].item()
                       for k in range(2000)])
    small, large = np.isin(firsts, range(10, 14)).mean(), (firsts < 5).mean()
    assert abs((firsts == 50).mean() - 0.5) < 0.05
    assert abs(small - 0.25) < 0.05 and abs(large - 0.25) < 0.05
    assert not np.isin(firsts, range(20, 23)).any()  # the third largest is never taken


def test_rand_flip(pair):
    seen = set()
    for key in KEYS:
        got = ops.RandFlip()(*pair, key=key)
        both(got, reference.rand_flip(*pair, reference.Draws(key, 0)))
        seen.add(got[0].tobytes())
    assert len(seen) == 8
    for p in [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1), (0, 0, 0)]:
        both(ops.RandFlip(p)(*pair, key=0), reference.rand_flip(*pair, reference.Draws((0, 0), 0), p))


def test_flips_come_with_their_probability():
    image = np.arange(2, dtype=np.float32).reshape(1, 2, 1, 1)
    flipped = sum(ops.RandFlip()(image, key=k)[0][0, 0, 0, 0] == 1 for k in range(3000))
    assert abs(flipped / 3000 - 1 / 3) < 0.04


@pytest.mark.parametrize("source", ["uint8", "int16", "uint16", "int32", "float32", "float64"])
@pytest.mark.parametrize("target", ["float32", "uint8"])
def test_cast_equals_numpy_astype(source, target):
    rng = np.random.default_rng(3)
    volume = (rng.random((1, 3, 4, 70)) * 255).astype(source)
    for view in (volume, volume[..., ::-1], volume[:, ::2, ::-1, 3:60:2]):
        same(ops.Cast(target, None)(view)[0], view.astype(target))
    swapped = volume.astype(volume.dtype.newbyteorder(">"))
    if volume.itemsize > 1:
        with pytest.raises(TypeError, match=f"image has dtype .{volume.dtype.str[1:]}; .*astype"):
            ops.Cast()(swapped)


def test_cast_to_uint8_saturates():
    values = [-1e30, -1.5, -0.5, 0, 254.99, 255, 256, 1e30, np.inf, -np.inf, np.nan]
    volume = np.array(values, np.float64).reshape(1, 1, 1, -1)
    want = [0, 0, 0, 0, 254, 255, 255, 255, 255, 0, 0]
    for dtype in ("float32", "float64"):
        assert ops.Cast("uint8")(volume.astype(dtype))[0].ravel().tolist() == want
    whole = np.array([-300, -1, 0, 7, 255, 256, 30000], np.int16).reshape(1, 1, 1, -1)
    assert ops.Cast("uint8")(whole)[0].ravel().tolist() == [0, 0, 0, 7, 255, 255, 255]


def test_casts_in_a_row_are_each_done(pair):
    image = pair[0] * 300
    got = ops.Pipeline([ops.Cast("uint8"), ops.Cast("float32")])(image)[0]
    same(got, np.clip(image, 0, 255).astype(np.uint8).astype(np.float32))
    got = ops.Pipeline([ops.Normalize(), ops.Cast("uint8"), ops.Normalize()])(image)[0]
    first = normalized(image).clip(0, 255).astype(np.uint8)
    same(got, normalized(first.astype(np.float32)))


@pytest.mark.parametrize("around_one", [False, True])
def test_rand_scale_intensity(pair, around_one, level):
    operator = ops.RandScaleIntensity(0.5, 0.7, 1.3, around_one)
    changed = 0
    for key in KEYS:
        got, label = ops.Pipeline([operator], _level=level)(*pair, key=key)
        want = reference.rand_scale(pair[0], reference.Draws(key, 0), 0.5,
                                    offset=0.0 if around_one else 1.0)
        both((got, label), (want, pair[1]))
        changed += not np.array_equal(got, pair[0])
    assert 8 < changed < 32


def test_rand_gaussian_noise(pair, level):
    operator = ops.Pipeline([ops.RandGaussianNoise(0.5, 0.3, mean=0.25)], _level=level)
    for key in KEYS:
        want = reference.rand_noise(pair[0], reference.Draws(key, 0), 0.5, 0.3, 0.25)
        both(operator(*pair, key=key), (want, pair[1]))


def normalized(image, low=-79.0, high=304.0, mean=101.0, std=76.9):
    low, high, mean, std = (np.float32(v) for v in (low, high, mean, std))
    return (np.clip(image, low, high) - mean) / std


def test_normalize_equals_reference(pair, level):
    image = pair[0] * 300
    image[0, 0, 0, :3] = [np.nan, np.inf, -np.inf]
    same(ops.Pipeline([ops.Normalize()], _level=level)(image)[0], normalized(image))
    whole = image.astype(np.float64).clip(-1000, 1000)
    whole[np.isnan(whole)] = 0
    same(ops.Normalize()(whole.astype(np.int16))[0],
         normalized(whole.astype(np.int16).astype(np.float32)))


@pytest.mark.parametrize("size", [(14, 17, 19), (15, 20, 24), (3, 40, 3), (50, 3, 20), 1])
def test_pad_equals_numpy_pad(pair, size):
    wanted = (size,) * 3 if isinstance(size, int) else size
    missing = [max(0, w - h) for w, h in zip(wanted, SHAPE)]
    widths = [(0, 0), *((m // 2, m - m // 2) for m in missing)]
    both(ops.Pad(size)(*pair), [np.pad(v, widths, mode="edge") for v in pair])
    got = ops.Pad(size, mode="constant", image=-2.2, label=7)(*pair)
    both(got, [np.pad(v, widths, constant_values=c) for v, c in zip(pair, (np.float32(-2.2), 7))])
    whole = (pair[0] * 100).astype(np.int16)
    same(ops.Pad(size)(whole)[0], np.pad(whole, widths, mode="edge"))


def test_pad_constant_needs_float32_or_uint8(pair):
    with pytest.raises(ValueError, match="Cast before"):
        ops.Pad(50, mode="constant")(pair[0].astype(np.float64))


@pytest.mark.parametrize("size", [(7, 9, 10), (14, 17, 19), (1, 1, 1), (28, 30, 41), (1, 40, 2)])
def test_resample_to_a_size(pair, size):
    torch = pytest.importorskip("torch")
    from torch.nn.functional import interpolate

    image, label = ops.Resample(size)(*pair)
    want = interpolate(torch.from_numpy(pair[0])[None], size=size, mode="trilinear",
                       align_corners=True)[0].numpy()
    np.testing.assert_allclose(image, want, atol=2e-5)
    assert image.dtype == np.float32 and image.shape == want.shape
    same(label, interpolate(torch.from_numpy(pair[1])[None], size=size, mode="nearest")[0].numpy())


def test_resample_by_factors(pair, level):
    factors = (3.0 / 1.6, 0.8 / 1.2, 1.0)
    image, label = ops.Pipeline([ops.Resample(factors=factors)], _level=level)(*pair)
    assert image.shape == label.shape == (1, int(factors[0] * 14), int(factors[1] * 17), 19)
    np.testing.assert_array_equal(image, ops.Resample(image.shape[1:])(*pair)[0])
    with pytest.raises(ValueError, match="axis 3"):
        ops.Resample(factors=(1, 1, 0.01))(*pair)


def test_a_linear_ramp_stays_one():
    z, y, x = np.meshgrid(*[np.linspace(-1, 1, n) for n in (5, 6, 7)], indexing="ij")
    ramp = (z + 2 * y - 3 * x).astype(np.float32)[None]
    image, _ = ops.Resample((9, 4, 13))(ramp)
    z, y, x = np.meshgrid(*[np.linspace(-1, 1, n) for n in (9, 4, 13)], indexing="ij")
    np.testing.assert_allclose(image[0], z + 2 * y - 3 * x, atol=3e-6)


def test_several_channels():
    image = np.random.default_rng(0).standard_normal((3, *SHAPE)).astype(np.float32)
    label = make_pair(0, SHAPE)[1]
    got = ops.Pipeline([ops.RandBalancedCrop(6, 1.0), ops.RandFlip(1), ops.RandGaussianNoise(1)])
    result = got(image, label, key=5)
    want = reference.rand_balanced_crop(image, label, reference.Draws((5, 2**64 - 1), 0), (6,) * 3, 1)
    want = reference.rand_flip(*want, reference.Draws((5, 2**64 - 1), 1), (1, 1, 1))
    both(result, (reference.rand_noise(want[0], reference.Draws((5, 2**64 - 1), 2), 1), want[1]))
    channels = [ops.Resample(9)(image[c:c + 1])[0][0] for c in range(3)]
    same(ops.Resample(9)(image)[0], np.stack(channels))
    same(ops.Pad(20)(image)[0], np.stack([ops.Pad(20)(image[c:c + 1])[0][0] for c in range(3)]))


def test_strided_and_unaligned_arrays(pair):
    """Any strides, also negative, zero and odd ones."""
    key = (7, 7)
    pipeline = ops.Pipeline([ops.RandBalancedCrop(5, 1.0), ops.RandFlip(0.5), ops.Cast(),
                             ops.RandGaussianNoise(1)])
    raw = np.zeros(pair[0].nbytes + 1, np.uint8)
    unaligned = raw[1:].view(np.float32).reshape(pair[0].shape)
    unaligned[...] = pair[0]
    broadcast = np.broadcast_to(pair[0][:, :, :, :1], pair[0].shape)
    for image in (pair[0][:, ::-1], pair[0][..., ::-1], np.asfortranarray(pair[0]), unaligned,
                  broadcast, pair[0].transpose(0, 1, 2, 3)[:, :, ::-1]):
        label = pair[1][:, :, ::-1]
        got = pipeline(image, label, key=key)
        want = pipeline(np.ascontiguousarray(image), np.ascontiguousarray(label), key=key)
        both(got, want)


def test_crop_and_flip_move_earlier_noise(pair):
    """A crop and flips after noise move the noise along."""
    key = (3, 1 << 63)
    pipeline = ops.Pipeline([ops.RandGaussianNoise(1.0), ops.RandFlip((1, 0, 1)), ops.RandCrop(4)])
    noisy = reference.rand_noise(pair[0], reference.Draws(key, 0), 1.0)
    want = reference.rand_flip(noisy, pair[1], reference.Draws(key, 1), (1, 0, 1))
    both(pipeline(*pair, key=key), reference.rand_crop(*want, reference.Draws(key, 2), (4,) * 3))


def test_long_chain_of_arithmetic(pair):
    steps = [ops.RandGaussianNoise(1.0), ops.RandScaleIntensity(1.0), ops.Normalize()] * 5
    image = pair[0]
    for number, step in enumerate(steps):
        draws = reference.Draws((1, 2), number)
        image = (reference.rand_noise(image, draws, 1.0) if isinstance(step, ops.RandGaussianNoise)
                 else reference.rand_scale(image, draws, 1.0)
                 if isinstance(step, ops.RandScaleIntensity) else normalized(image))
    both(ops.Pipeline(steps)(*pair, key=(1, 2)), (image, pair[1]))


def test_every_order_of_operators(pair):
    """Fused or one by one: the same bytes."""
    steps = [ops.RandFlip(0.5), ops.RandGaussianNoise(1.0), ops.Pad(21), ops.RandCrop(9),
             ops.Resample((12, 12, 12)), ops.Normalize(), ops.RandBalancedCrop(8, 1.0),
             ops.RandScaleIntensity(1.0), ops.Cast()]
    rng = np.random.default_rng(11)
    for key in KEYS[:25]:
        order = [steps[i] for i in rng.permutation(len(steps)) if rng.random() < 0.8]
        result = pair
        for number, step in enumerate(order):
            padding = [ops.Pad(1)] * number  # does nothing; puts the step at its place
            try:
                result = ops.Pipeline([*padding, step])(*result, key=key)
            except ValueError as error:
                assert "fewer than the patch" in str(error)
                with pytest.raises(ValueError, match="fewer than the patch"):
                    ops.Pipeline(order)(*pair, key=key)
                break
        else:
            both(ops.Pipeline(order)(*pair, key=key), result)


@pytest.mark.parametrize("dtype", ["int16", "float32", "float64"])
def test_a_label_that_was_cast_has_boxes(dtype):
    """Fused as one by one, of arrays and of flips of them."""
    image, label = make_pair(4, SHAPE)
    for key in KEYS[:10]:
        crop = [ops.RandFlip(0.5), ops.Cast(None, "uint8"), ops.RandBalancedCrop(5, 1.0)]
        both(ops.Pipeline(crop)(image, label.astype(dtype), key=key),
             ops.Pipeline(crop)(image, label, key=key))


def test_a_pipeline_of_nothing_copies(pair):
    got = ops.Pipeline([])(*pair)
    both(got, pair)
    assert not np.shares_memory(got[0], pair[0])


def test_given_outputs_are_used(pair):
    pipeline = ops.Pipeline([ops.RandCrop(4)])
    out = np.empty((1, 4, 4, 4), np.float32), np.empty((1, 4, 4, 4), np.uint8)
    got = pipeline(*pair, key=1, out=out)
    assert got[0] is out[0] and got[1] is out[1]
    both(got, pipeline(*pair, key=1))
    for bad in [(np.empty((1, 4, 4, 5), np.float32), None), (np.empty((1, 4, 4, 4)), None),
                (out[0], np.empty((1, 4, 4, 4), np.int16)), (pair[0][:, :4, :4, :4].copy("F"), None)]:
        with pytest.raises((ValueError, BufferError)):
            pipeline(*pair, key=1, out=bad)
    with pytest.raises(ValueError, match="shares memory"):
        ops.RandFlip(1)(pair[0], key=1, out=(pair[0], None))
    plain = (ctypes.c_float * 4 * 4 * 4 * 1)()  # a buffer without strides
    assert pipeline(*pair, key=1, out=(plain, None))[0] is plain
    same(np.array(plain), out[0])
    frozen = out[0].copy()
    frozen.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        pipeline(*pair, key=1, out=(frozen, None))


def test_inputs_are_never_changed(pair):
    before = [v.copy() for v in pair]
    ops.Pipeline([ops.RandFlip(1), ops.Normalize(), ops.RandGaussianNoise(1)])(*pair, key=1)
    both(before, pair)


def test_equal_keys_draw_equal_noise(pair):
    operator = ops.RandGaussianNoise(1.0)
    assert not np.array_equal(operator(pair[0])[0], operator(pair[0])[0])
    same(operator(pair[0], key=-1)[0], operator(pair[0], key=2**64 - 1)[0])
    same(operator(pair[0], key=9)[0], operator(pair[0], key=(9, 2**64 - 1))[0])
    torch = pytest.importorskip("torch")
    torch.manual_seed(4)
    first = operator(pair[0])[0]
    torch.manual_seed(4)
    same(operator(pair[0])[0], first)


@pytest.mark.parametrize(("make", "words"), [
    (lambda: ops.RandCrop(0), "at least 1"),
    (lambda: ops.RandCrop((1, 2)), "one or three"),
    (lambda: ops.RandBalancedCrop(4, 1.5), "probability"),
    (lambda: ops.RandFlip((0.1, 0.2)), "one or three"),
    (lambda: ops.RandFlip(-1), "probability"),
    (lambda: ops.Cast("int16"), "float32, uint8"),
    (lambda: ops.RandScaleIntensity(p=2), "probability"),
    (lambda: ops.RandGaussianNoise(std=-1), "negative"),
    (lambda: ops.Normalize(std=0), "positive"),
    (lambda: ops.Normalize(low=2, high=1), "exceeds"),
    (lambda: ops.Pad(4, mode="mirror"), "mode"),
    (lambda: ops.Resample(), "either"),
    (lambda: ops.Resample(4, (1, 1, 1)), "either"),
    (lambda: ops.Resample(factors=(1, 0, 1)), "positive"),
    (lambda: ops.ReadNpy(image="complex64"), "dtype"),
    (lambda: ops.Pipeline([ops.RandFlip(), ops.ReadNpy()]), "first"),
])
def test_arguments_are_checked(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(("make", "words"), [
    (lambda: ops.RandCrop(2.5), "integer"),
    (lambda: ops.RandCrop((4, 4.0, 4)), "integer"),
    (lambda: ops.Pad("345"), "integer"),
    (lambda: ops.Resample((4, None, 4)), "integer"),
    (lambda: ops.RandScaleIntensity(low="0.7"), "number"),
    (lambda: ops.RandGaussianNoise(mean=None), "number"),
    (lambda: ops.Pad(4, image=1j), "number"),
])
def test_non_numbers_are_refused_at_once(make, words):
    with pytest.raises(TypeError, match=words):
        make()


def test_numbers_of_numpy(pair):
    both(ops.RandCrop(np.int64(5))(*pair, key=1), ops.RandCrop(5)(*pair, key=1))
    both(ops.RandCrop(np.array([5, 4, 3]))(*pair, key=1), ops.RandCrop((5, 4, 3))(*pair, key=1))
    both(ops.RandFlip(np.float32(0.5))(*pair, key=1), ops.RandFlip(0.5)(*pair, key=1))
    for make in (lambda: ops.Cast(">f4"), lambda: ops.ReadNpy(">i2")):
        with pytest.raises(ValueError, match="dtype must be .*, got >"):
            make()


def test_wrong_volumes_are_named(pair):
    image, label = pair
    for volume, kind, words in [(image[0], ValueError, "4 axes"),
                                (image[:, :0], ValueError, "empty"),
                                (image.astype(complex), TypeError, "image has dtype complex128"),
                                (image.astype(np.float16), TypeError, "dtype float16; a volume"),
                                (image > 0, TypeError, "image has dtype bool"),
                                (image.tolist(), TypeError, "or a path, got list$"),
                                (None, TypeError, "image must be .* got NoneType")]:
        with pytest.raises(kind, match=words):
            ops.RandFlip()(volume)
    with pytest.raises(TypeError, match="label has dtype int64"):
        ops.RandFlip()(image, label.astype(np.int64))
    with pytest.raises(TypeError, match="buffer format"):
        ops.RandFlip()(memoryview(image.astype(np.float16)))
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"label must be .* got Tensor; pass its numpy\(\)"):
        ops.RandFlip()(image, torch.from_numpy(label))
    for call, words in [
        (lambda: ops.RandCrop(18)(image, label), "axis 1 has 14 voxels, fewer"),
        (lambda: ops.RandCrop(3)(image, label[:, :, :-1]), "differ on axis 2"),
        (lambda: ops.RandBalancedCrop(3)(image), "needs a label"),
        (lambda: ops.RandBalancedCrop(3, 1.0)(image, label.astype(np.int16)), "uint8 label"),
        (lambda: ops.RandFlip()("a.npy", "b.npy"), "takes arrays, not paths"),
        (lambda: ops.ReadNpy()(image, label), "takes paths, not arrays"),
        (lambda: ops.Resample(2**30)(image, label), r"2\^63"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(TypeError, match="both be paths"):
        ops.Pipeline([])(image, "b.npy")
    with pytest.raises(TypeError, match="operator 0"):
        ops.Pipeline(["flip"])


def test_too_large_for_memory(pair):
    with pytest.raises(MemoryError, match="bytes"):
        ops.Resample((2**20, 2**20, 2**18))(pair[0])


@pytest.mark.parametrize("shape", [(1, 2**31, 2**31, 1), (1, 1, 1, 2**62), (1, 2**30, 2**31, 1)])
@pytest.mark.parametrize("steps", [[ops.RandGaussianNoise(1.0), ops.RandCrop(1)], [ops.Resample(1)]])
def test_one_voxel_seen_again_and_again(shape, steps):
    """Its own bytes can be counted, those of the float32 volume that is made of it cannot."""
    endless = np.broadcast_to(np.uint8(1), shape)
    with pytest.raises(ValueError, match=r"2\^63 bytes"):
        ops.Pipeline([ops.Cast(), *steps])(endless, key=1)
