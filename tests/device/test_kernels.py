"""The kernel of ``csrc/cuda`` against the operators of the host, and nvcc's output.

No device is needed: the kernel's source is also compiled for the CPU, and launched by
a loop over its threads.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minato import ops
from minato.device import operators, provider
from minato.device.provider import Finisher, Job
from minato.ops.operators import DTYPES as CODES

from .emulated import IMAGE, ROOT, Emulated, build
from .fake import Fake

Array = np.ndarray
Pair = tuple[Array, Array]

#: one operator each, as they may stand in any order
STEPS = st.one_of(
    st.builds(ops.RandFlip, st.sampled_from([0.5, (1.0, 0.0, 0.5)])),
    st.builds(
        ops.Cast, st.sampled_from([None, "float32", "uint8"]),
        st.sampled_from([None, "float32", "uint8"]),
    ),
    st.builds(ops.RandScaleIntensity, st.sampled_from([0.5, 1.0]), around_one=st.booleans()),
    st.builds(ops.RandGaussianNoise, st.sampled_from([0.5, 1.0]), mean=st.sampled_from([0.0, 0.3])),
    st.builds(ops.Normalize),
)  # fmt: skip
DTYPES = st.sampled_from(["uint8", "int16", "uint16", "int32", "float32", "float64"])
LENGTHS = st.tuples(st.integers(1, 2), *[st.integers(1, 9)] * 2, st.integers(1, 70))
KEYS = st.lists(st.tuples(*[st.integers(0, 2**64 - 1)] * 2), min_size=1, max_size=3)
ODD = [np.nan, np.inf, -np.inf, -0.0, 1e-42, 255.5, -1e-310, 3e38]


def volumes(seed: int, count: int, shape: tuple[int, ...], dtype: str) -> Array:
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "f":
        made = rng.normal(60.0, 150.0, (count, *shape))
        made.reshape(-1)[: len(ODD)] = rng.permutation(ODD)[: made.size]
        with np.errstate(over="ignore"):
            return made.astype(dtype)
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max, (count, *shape), dtype, endpoint=True)


def bits(array: Array) -> bytes:
    """Equal except for the patterns of NaN, of which a device knows one."""
    if array.dtype.kind == "f":
        array = np.where(np.isnan(array), array.dtype.type(np.nan), array)
    return array.tobytes()


def on_both(emulated: Emulated, pipeline: ops.Pipeline, keys: Any, pairs: Pair) -> None:
    """Finishes a batch on the fake device and on the host."""
    wanted = [pipeline(image, label, key=key) for image, label, key in zip(*pairs, keys)]
    steps = len(pipeline.operators)
    recipes = np.stack([
        np.frombuffer(pipeline._get().recipe(steps, *key), np.int64) for key in keys
    ])  # fmt: skip
    for which, before in enumerate(pairs):
        want = np.stack([sample[which] for sample in wanted])
        got = emulated.finished(which, before, want.dtype, recipes, steps)
        assert bits(got) == bits(want), "image" if which == 0 else "label"


@settings(max_examples=150, deadline=None)
@given(
    st.lists(STEPS, min_size=1, max_size=12), st.integers(0, 2**32), LENGTHS, DTYPES, DTYPES, KEYS
)
def test_any_pipeline_has_the_same_bytes(
    emulated: Emulated, steps: Any, seed: int, shape: Any, image: str, label: str, keys: Any
) -> None:
    pairs = volumes(seed, len(keys), shape, image), volumes(seed + 1, len(keys), shape, label)
    on_both(emulated, ops.Pipeline(steps), keys, pairs)


def test_the_steps_of_the_3d_unet(emulated: Emulated) -> None:
    steps = ops.unet3d_training(16).operators[2:]
    keys = [(1, n) for n in range(24)]  # one in ten is scaled, one in ten has noise
    shape = (1, 16, 16, 16)
    pairs = volumes(5, len(keys), shape, "float32"), volumes(6, len(keys), shape, "uint8")
    on_both(emulated, ops.Pipeline(steps), keys, pairs)


def test_more_voxels_than_threads(emulated: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread then handles several. No axis is a multiple of the block size."""
    pairs = volumes(1, 1, (1, 2, 3, 3_000_001), "uint8"), volumes(2, 1, (1, 1, 1, 1), "uint8")
    recipes = np.frombuffer(ops.Pipeline([ops.RandFlip(1.0)])._get().recipe(1, 0, 0), np.int64)
    got = emulated.finished(0, pairs[0], np.dtype(np.uint8), recipes[None], 1)
    np.testing.assert_array_equal(got, pairs[0][:, :, ::-1, ::-1, ::-1])
    assert emulated.counts()["blocks"] == 65535


@pytest.mark.parametrize(
    ("name", "text", "other"),
    [
        ("cuda/mn_finish.cu", "ahead ^= step->axes", "ahead ^= 0"),
        ("cuda/mn_finish.cu", "x = (axes & 8)", "x = (axes & 4)"),
        ("cuda/mn_finish.cu", "{recipe[0], recipe[1], step", "{recipe[1], recipe[0], step"),
        ("cuda/mn_finish.cu", "recipe[1], step->number}", "recipe[1], 0}"),
        ("cuda/mn_finish.cu", "* 16 + element % 16", "* 16 + element % 4"),
        ("cuda/mn_finish.cu", "else if (job->which == 0)", "else"),
        ("ops/mn_recipe.h", "(float)((double)v * factor)", "v * (float)factor"),
        ("ops/mn_recipe.h", "v + (mean + std * normal)", "(v + mean) + std * normal"),
        ("ops/mn_normals_body.h", "box_muller)(&c0, &c1,", "box_muller)(&c1, &c0,"),
    ],
)  # fmt: skip
def test_differing_kernel_is_found(tmp_path: Path, name: str, text: str, other: str) -> None:
    """The same batch reveals it to a program, which then finishes samples on the host."""
    fake = Fake()
    try:
        fake.finisher = Emulated(build(tmp_path, {name: (text, other)})).finisher
        said = operators.differs(fake)
    finally:
        fake.close()
    assert said is not None and "other bytes than those of the host" in said


def test_agreeing_device_is_trusted(fake: Fake, emulated: Emulated) -> None:
    fake.finisher = emulated.finisher
    assert operators.differs(fake) is None


# ---- the driver ------------------------------------------------------------------------------


def test_the_context_of_the_caller_stays(emulated: Emulated) -> None:
    assert emulated.counts()["contexts"] == 0 and emulated.counts()["loads"] == 1


@pytest.mark.parametrize(
    "name",
    ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuModuleLoadData", "cuModuleGetFunction"],
)
def test_a_driver_that_refuses_says_why(emulated: Emulated, name: str) -> None:
    emulated.fails(name)
    try:
        with pytest.raises(RuntimeError, match=rf"{name}: CUDA_ERROR_MADE_UP \(2\)"):
            Finisher(emulated.library, 0, IMAGE)
    finally:
        emulated.fails("")
    assert emulated.counts()["contexts"] == 0


def test_no_such_device_and_no_such_code(emulated: Emulated) -> None:
    with pytest.raises(RuntimeError, match="cuDeviceGet"):
        Finisher(emulated.library, 1, IMAGE)
    with pytest.raises(RuntimeError, match="cuModuleLoadData: CUDA_ERROR_INVALID_IMAGE"):
        Finisher(emulated.library, 0, IMAGE.replace(b"code", b"text"))
    assert emulated.counts()["contexts"] == 0


@pytest.mark.parametrize("image", [
    IMAGE[:-1], IMAGE[:16], IMAGE[:15], IMAGE[:3], b"", b"text" * 99,
    IMAGE[:6] + b"\xff\xff" + IMAGE[8:], IMAGE[:8] + b"\xff" * 8 + IMAGE[16:],
], ids=range(8))  # fmt: skip
def test_truncated_kernel_image_is_refused(
    emulated: Emulated, image: bytes
) -> None:
    """The driver is not given the length, so it would read past the end."""
    before = emulated.counts()["loads"]
    with pytest.raises(ValueError, match="damaged or cut short: build minato again"):
        Finisher(emulated.library, 0, image)
    assert emulated.counts()["loads"] == before


@pytest.mark.skipif(isinstance(provider.kernels(), str), reason="built without nvcc")
def test_built_kernel_image_has_the_checked_header(
    emulated: Emulated, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The emulated driver is given it, and accepts only what it knows."""
    monkeypatch.setattr("minato.device.provider.CUDA", emulated.library)
    assert "cuModuleLoadData: CUDA_ERROR_INVALID_IMAGE" in str(provider.finisher_of(0))
    image = provider.kernels()
    assert isinstance(image, bytes)
    (tmp_path / "kernels").write_bytes(image[: len(image) // 2])
    monkeypatch.setattr(provider, "KERNELS", str(tmp_path / "kernels"))
    assert "cut short" in str(provider.finisher_of(0))
    monkeypatch.setattr(provider, "KERNELS", str(tmp_path))  # a folder: it cannot be read
    assert "Is a directory" in str(provider.finisher_of(0)) and "run on the host" in operators.describe()


def test_no_driver_and_another_library() -> None:
    with pytest.raises(RuntimeError, match="there is no libnowhere.so.1, the driver's library"):
        Finisher("libnowhere.so.1", 0, IMAGE)
    with pytest.raises(RuntimeError, match="libm.so.6 is too old"):
        Finisher("libm.so.6", 0, IMAGE)


def test_a_launch_that_fails(emulated: Emulated) -> None:
    emulated.fails("cuLaunchKernel", 700)
    voxels = np.zeros((1, 1, 1, 1, 1), np.uint8)
    try:
        with pytest.raises(RuntimeError, match=r"cuLaunchKernel: CUDA_ERROR_MADE_UP \(700\)"):
            emulated.finished(0, voxels, voxels.dtype, np.zeros(2, np.int64), 0)
    finally:
        emulated.fails("")
    assert emulated.counts()["contexts"] == 0


@pytest.mark.parametrize(
    ("dtypes", "shape"),
    [
        ((5, 5), (1, 1, 0, 1, 1)),
        ((5, 5), (1, 1, 2**16, 2**16, 1)),
        ((5, 5), (2**32, 1, 1, 1, 1)),
        ((0, 5), (1, 1, 1, 1, 1)),
        ((7, 5), (1, 1, 1, 1, 1)),
        ((5, 3), (1, 1, 1, 1, 1)),
    ],
)
def test_invalid_jobs_raise(emulated: Emulated, dtypes: Any, shape: Any) -> None:
    with pytest.raises(ValueError, match="voxel|samples|volumes"):
        emulated.finisher.run(0, Job(0, dtypes, shape, 0, 0, 0, 1))


def test_a_batch_of_nothing_is_finished(emulated: Emulated) -> None:
    emulated.finisher.run(0, Job(0, (5, 5), (0, 1, 1, 1, 1), 0, 0, 0, 1))


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=8 * 18, max_size=8 * 18), st.sampled_from([1, 2, 3, 4, 5, 6]))
def test_no_recipe_reaches_beyond_its_sample(emulated: Emulated, data: bytes, code: int) -> None:
    """For any recipe. The memory beyond the sample holds other bytes."""
    dtype = {v: k for k, v in CODES.items()}[code]
    around = np.full((3, 1, 2, 3, 5), 7, dtype)
    recipe = np.frombuffer(data, np.int64).copy()
    recipe[2::4] &= ~np.int64(2**32 - 8)  # kinds that there are, and others
    target = np.full((3, 1, 2, 3, 5), 9, dtype)
    places = around[1].ctypes.data, target[1].ctypes.data, recipe.ctypes.data
    emulated.finisher.run(0, Job(0, (code, code), (1, 1, 2, 3, 5), *places, 4))
    assert (target[[0, 2]] == 9).all() and (around == 7).all()


# ---- what nvcc makes of it -------------------------------------------------------------------

#: a float operation whose result is not rounded once, or not to nearest
CONTRACTED = re.compile(
    r"\b(?:fma|mad)\.\S*f(?:32|64)|\.ftz|\.approx|\b(?:add|sub|mul|div|sqrt)\.f(?:32|64)"
)
NVCC = shutil.which("nvcc")


def ptx(*flags: str) -> str:
    done = subprocess.run(
        [str(NVCC), "-std=c++17", "-Icsrc", "-Iminato/include", "-ptx", *flags,
         "csrc/cuda/mn_finish.cu", "-o", "-"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout


@pytest.mark.skipif(isinstance(provider.kernels(), str), reason="built without nvcc")
def test_the_kernels_that_were_built_round_each_operation() -> None:
    """Code for later devices is text in the file; the code for others is made from the same."""
    image = provider.kernels()
    assert isinstance(image, bytes)
    text = image.decode("latin-1")
    assert text.count(".visible .entry mn_finish_kernel") == 1
    found = set(re.findall(r"\b(?:add|sub|mul|div|sqrt)\.\S*f(?:32|64)\b", text))
    assert found == {"add.rn.f32", "sub.rn.f32", "mul.rn.f32", "div.rn.f32", "sqrt.rn.f32",
                     "mul.rn.f64"}  # fmt: skip
    assert not CONTRACTED.findall(text)


@pytest.mark.skipif(NVCC is None, reason="there is no nvcc")
@pytest.mark.parametrize("flag", ["-fmad=true", "-ftz=true", "-prec-div=false"])
def test_other_flags_would_be_found(flag: str) -> None:
    assert CONTRACTED.findall(ptx(flag))
