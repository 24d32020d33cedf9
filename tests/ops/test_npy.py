"""Reading .npy files: only the needed parts, and clear errors for invalid files."""
from __future__ import annotations

import errno
import io
import os
import time

import numpy as np
import pytest

from minato import ops

from . import reference
from .conftest import STRESS, make_pair


def save(path, array, header: bytes | None = None) -> str:
    """A .npy file; with `header`, that dict text in place of NumPy's."""
    if header is None:
        np.save(path, array)
    else:
        padded = header + b" " * (-(len(header) + 11) % 64) + b"\n"
        path.write_bytes(b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded
                         + array.tobytes())
    return str(path)


@pytest.fixture
def image():
    return make_pair(2, (6, 7, 8))[0]


def read(path) -> np.ndarray:
    return ops.ReadNpy()(path)[0]


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "int32", "float32", "float64"])
def test_each_dtype_reads_as_saved(tmp_path, image, dtype):
    array = (image * 50).astype(dtype)
    got = ops.ReadNpy(image=dtype)(save(tmp_path / "a.npy", array))[0]
    assert got.dtype == array.dtype
    np.testing.assert_array_equal(got, array)
    other = "float32" if dtype != "float32" else "uint8"
    with pytest.raises(ValueError, match=f"a.npy: has dtype {dtype} where {other}"):
        ops.ReadNpy(image=other)(tmp_path / "a.npy")


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_each_npy_version_is_read(tmp_path, image, version):
    stream = io.BytesIO()
    np.lib.format.write_array(stream, image, version=version)
    (tmp_path / "a.npy").write_bytes(stream.getvalue())
    np.testing.assert_array_equal(read(tmp_path / "a.npy"), image)


@pytest.mark.parametrize("header", [
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (1, 6, 7, 8)}",
    b'{"shape": (1,6,7,8,), "descr":"<f4","fortran_order":False,}',
    b"{'shape': (1L, 6L, 7L, 8L), 'fortran_order': False, 'descr': '<f4', }",
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (1, 6, 7, 8), }" + b" " * 5000,
])
def test_headers_that_mean_the_same(tmp_path, image, header):
    np.testing.assert_array_equal(read(save(tmp_path / "a.npy", image, header)), image)


def test_unaligned_voxels(tmp_path, image):
    """A header of odd length puts the voxels at odd offsets."""
    text = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1, 6, 7, 8)}\n"
    path = tmp_path / "a.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
                     + image.tobytes())
    np.testing.assert_array_equal(read(path), image)
    flipped = ops.Pipeline([ops.ReadNpy(), ops.RandFlip(1)])(path, key=0)[0]
    np.testing.assert_array_equal(flipped, image[:, ::-1, ::-1, ::-1])


GOOD = "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 6, 7, 8), }"


@pytest.mark.parametrize(("old", "new", "words"), [
    ("(1, 6, 7, 8)", "(1, 6, 7, 9)", "truncated: the header promises 1512 bytes.* has 1344"),
    ("(1, 6, 7, 8)", "(1, 6, 7, 7)", "too long: the header promises 1176 bytes"),
    ("(1, 6, 7, 8)", "(6, 7, 8)", "has 3 axes"),
    ("(1, 6, 7, 8)", "()", "has 0 axes"),
    ("(1, 6, 7, 8)", "(1, 0, 7, 8)", "axis 1 is empty"),
    ("(1, 6, 7, 8)", "(1, 99999999999999999999, 7, 8)", "exceeds 64 bits"),
    ("(1, 6, 7, 8)", "(9223372036854775807, 2, 7, 8)", r"more than 2\^63 bytes"),
    ("(1, 6, 7, 8)", "(4294967296, 4294967296, 1, 1)", r"more than 2\^63 bytes"),
    ("(1, 6, 7, 8)", "(1, -6, 7, 8)", "not a tuple of lengths"),
    ("(1, 6, 7, 8)", "(1, 6.0, 7, 8)", "not a tuple of lengths"),
    ("(1, 6, 7, 8)", "(1, 06, 7, 8)", "not a tuple of lengths"),
    ("(1, 6, 7, 8)", "[1, 6, 7, 8]", "not a tuple of lengths"),
    ("(1, 6, 7, 8)", "(" + "1, " * 70 + ")", "more than 64 axes"),
    ("(1, 6, 7, 8)", "(1, 6, 7, 8", "not a tuple of lengths"),
    ("False", "True", "Fortran order"),
    ("False", "0", "neither True nor False"),
    ("<f4", ">f4", "dtype '>f4' is not supported"),
    ("<f4", "|O", "dtype '|O' is not supported"),
    ("<f4", "<f2", "dtype '<f2' is not supported"),
    ("<f4", "<f4" * 20, "is not supported"),
    ("<f4", "\n\x7f4", r"dtype '\?\?4' is not supported"),
    ("'<f4'", "[('a', '<f4')]", "structured"),
    ("'<f4'", "'<f4", "a string without an end|escape|expected|axes|key"),
    ("'<f4'", r"'<f\x34'", "escape"),
    ("'<f4'", "4", "a string was expected"),
    ("'descr'", "'other'", "unknown or repeated key"),
    ("'shape'", "'descr'", "unknown or repeated key"),
    ("'descr': '<f4', ", "", "is missing"),
    (", }", "} 1", "text after"),
    ("{", "", "no dict"),
    (": '<f4'", " '<f4'", "':' was expected"),
    (", 'shape'", " 'shape'", "',' or '}'"),
])
def test_headers_that_lie_or_are_broken(tmp_path, image, old, new, words):
    assert old in GOOD
    path = save(tmp_path / "bad_case.npy", image, GOOD.replace(old, new, 1).encode())
    with pytest.raises(ValueError, match=words) as error:
        read(path)
    assert str(error.value).startswith(path)


def test_invalid_npy_files_are_refused(tmp_path, image):
    whole = io.BytesIO()
    np.save(whole, image)
    whole = whole.getvalue()
    for content, words in [(b"", "it has 0 bytes"), (b"\x93NUMPY", "it has 6 bytes"),
                           (b"PK" + b"\0" * 200, "is not a .npy file"),
                           (b"\x93NUMPY\x04\x00" + whole[8:], "version 4.0"),
                           (b"\x93NUMPY\x01\x01" + whole[8:], "version 1.1"),
                           (whole[:100], "truncated within its header"),
                           (b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + bytes(100), "truncated"),
                           (b"\x93NUMPY\x02\x00\x00\x00\x02\x00" + bytes(200000), "64 KiB"),
                           (whole[:-1], "truncated"), (whole + b"x", "too long")]:
        (tmp_path / "a.npy").write_bytes(content)
        with pytest.raises(ValueError, match=words):
            read(tmp_path / "a.npy")


def test_errors_of_the_system_name_the_file(tmp_path, image):
    with pytest.raises(FileNotFoundError, match="missing.npy") as error:
        read(tmp_path / "missing.npy")
    assert error.value.errno == errno.ENOENT
    with pytest.raises(ValueError, match="not a regular file"):
        read(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a regular file"):
        read(tmp_path / "pipe")
    with pytest.raises(ValueError, match="null"):
        read("a\0b.npy")
    with pytest.raises(FileNotFoundError) as error:
        read("no utf-8: \udcff.npy")
    assert "no utf-8: \udcff.npy" in str(error.value)


def test_a_file_that_changes_is_read_anew(tmp_path, image):
    """Headers and boxes are kept for one state of a file only."""
    pipeline = ops.Pipeline([ops.ReadNpy(), ops.RandBalancedCrop(2, 1.0)])
    paths = [save(tmp_path / "x.npy", image), str(tmp_path / "y.npy")]
    label = np.zeros(image.shape, np.uint8)
    label[0, 0, 0, 0] = 1
    save(tmp_path / "y.npy", label)
    for key in range(5):
        assert pipeline(*paths, key=key)[1].any()
    assert pipeline.stats()["scans"] == 1 and pipeline.stats()["headers_parsed"] == 2
    moved = np.zeros((1, 9, 9, 9), np.uint8)
    moved[0, 8, 8, 8] = 1
    save(tmp_path / "y.npy", moved)
    save(tmp_path / "x.npy", np.zeros(moved.shape, np.float32))
    for key in range(5):
        assert pipeline(*paths, key=key)[1].any()
    assert pipeline.stats()["scans"] == 2 and pipeline.stats()["headers_parsed"] == 4


@pytest.mark.parametrize("differs", ["time", "size", "file"])
def test_each_part_of_a_files_identity_counts(tmp_path, differs):
    """Another time, another size or another file at the path: read again."""
    paths = tmp_path / "x.npy", tmp_path / "y.npy"
    np.save(paths[0], np.zeros((1, 4, 4, 4), np.float32))
    label = np.zeros((1, 4, 4, 4), np.uint8)
    label[0, 0, 0, 0] = 1
    np.save(paths[1], label)
    os.utime(paths[1], ns=(10**18, 10**18))
    pipeline = ops.Pipeline([ops.ReadNpy(), ops.RandBalancedCrop(1, 1.0)])
    assert pipeline(*paths, key=0)[1].item() == 1
    other = label[:, ::-1, ::-1, ::-1]
    if differs == "size":
        other = np.zeros((1, 5, 5, 5), np.uint8)
        other[0, 4, 4, 4] = 1
        np.save(paths[0], np.zeros(other.shape, np.float32))
    if differs == "file":
        (tmp_path / "kept").hardlink_to(paths[1])  # so that its inode is not used again
        paths[1].unlink()
    np.save(paths[1], np.ascontiguousarray(other))
    time_ns = 10**18 + (differs == "time")
    os.utime(paths[1], ns=(time_ns, time_ns))
    assert pipeline(*paths, key=0)[1].item() == 1
    assert pipeline.stats()["scans"] == 2


def test_boxes_are_found_each_time_unless_kept(files):
    pipeline = ops.Pipeline([ops.ReadNpy(), ops.RandBalancedCrop(8, 1.0, keep_boxes=False)])
    kept = ops.Pipeline([ops.ReadNpy(), ops.RandBalancedCrop(8, 1.0)])
    for key in range(6):
        for a, b in zip(pipeline(*files[0], key=key), kept(*files[0], key=key)):
            np.testing.assert_array_equal(a, b)
    assert pipeline.stats()["scans"] == 6 and kept.stats()["scans"] == 1
    assert not pipeline._get().export_boxes() and len(kept._get().export_boxes()) == 1


@pytest.mark.parametrize("patch", [(4, 5, 60), (4, 5, 6)])
def test_only_the_wanted_rows_are_read(tmp_path, patch):
    image, label = make_pair(4, (40, 50, 60))
    paths = save(tmp_path / "x.npy", image), save(tmp_path / "y.npy", label)
    pipeline = ops.Pipeline([ops.ReadNpy(), ops.RandCrop(patch)])
    pipeline(*paths, key=1)
    stats = pipeline.stats()
    if stats["files_mapped"]:
        assert stats["bytes_read"] == np.prod(patch) * (4 + 1)
    else:  # with what lies between them
        assert stats["bytes_read"] == 4 * (4 * 60 + patch[2]) * (4 + 1)
    assert stats["bytes_touched"] % 4096 == 0
    # a plane's band of rows lies in one page or two
    assert 4 * 4096 * 2 <= stats["bytes_touched"] <= 4 * 4096 * (2 + 2)


def test_rows_far_apart_are_read_alone(tmp_path):
    image = np.random.default_rng(0).standard_normal((1, 3, 4, 3000)).astype(np.float32)
    path = save(tmp_path / "x.npy", image)
    pipeline = ops.Pipeline([ops.ReadNpy(), ops.RandCrop((2, 3, 10)), ops.RandFlip((0, 1, 1))])
    got = pipeline(path, key=3)[0]
    assert pipeline.stats()["bytes_read"] == 2 * 3 * 10 * 4
    want, _ = reference.rand_crop(image, None, reference.Draws((3, 2**64 - 1), 1), (2, 3, 10))
    np.testing.assert_array_equal(got, want[:, :, ::-1, ::-1])


@pytest.mark.parametrize("key", range(12))
def test_training_chain_from_files(files, key, level):
    pipeline = ops.Pipeline([*ops.unet3d_training(9).operators[:4], ops.RandScaleIntensity(0.6),
                             ops.RandGaussianNoise(0.6)], _level=level)
    for paths in files:
        want = reference.training(np.load(paths[0]), np.load(paths[1]), (key, 5), (9, 9, 9), p=0.6)
        for got, expected in zip(pipeline(*paths, key=(key, 5)), want):
            np.testing.assert_array_equal(got, expected)


def test_direct_reads(files):
    plain, direct = ops.unet3d_training(9), ops.unet3d_training(9, direct=True)
    try:
        direct(*files[0], key=0)
    except ValueError as error:
        assert "cannot bypass the page cache; use direct=False" in str(error)
        pytest.skip("this file system has no O_DIRECT")
    for paths in files:
        for key in range(10):
            for a, b in zip(plain(*paths, key=key), direct(*paths, key=key)):
                np.testing.assert_array_equal(a, b)
    assert direct.stats()["bytes_read"] > plain.stats()["bytes_read"]


def test_no_descriptor_is_left_open(files, tmp_path):
    """After errors at every stage, too."""
    before = len(os.listdir("/proc/self/fd"))
    (tmp_path / "bad.npy").write_bytes(b"nothing that could be a volume")
    pipeline = ops.unet3d_training(9)
    for paths in [files[0], (files[0][0], files[1][1]), (files[0][0], tmp_path / "bad.npy"),
                  (tmp_path / "bad.npy", files[0][1]), (files[0][0], tmp_path / "none.npy")]:
        for key in range(4):
            try:
                pipeline(*paths, key=key)
            except (ValueError, OSError):
                pass
    assert len(os.listdir("/proc/self/fd")) <= before  # others may have closed some meanwhile


def mutate(rng: np.random.Generator, content: bytes) -> bytes:
    data = bytearray(content)
    for _ in range(rng.integers(1, 6)):
        at = int(rng.integers(0, min(len(data), 140))) if data else 0
        kind = rng.integers(0, 5)
        if kind == 0 and data:
            data[at] = rng.integers(0, 256)
        elif kind == 1 and data:
            data[at] = rng.choice(list(b"0123456789(),'{}:<>|LTrue \\\"["))
        elif kind == 2:
            data[at:at] = bytes(rng.integers(32, 127, rng.integers(1, 5), np.uint8))
        elif kind == 3:
            del data[at:at + int(rng.integers(1, 20))]
        elif rng.random() < 0.2:
            del data[int(rng.integers(0, len(data) + 1)):]
    return bytes(data)


def test_broken_files_raise_or_read_as_numpy(tmp_path):
    """Broken files end in an error or in what numpy.load reads as well."""
    rng = np.random.default_rng()
    seed = rng.bit_generator.seed_seq.entropy
    stream = io.BytesIO()
    np.save(stream, make_pair(0, (3, 4, 5))[0])
    path, accepted, end = tmp_path / "a.npy", 0, time.monotonic() + STRESS
    while time.monotonic() < end:
        path.write_bytes(mutate(rng, stream.getvalue()))
        try:
            got = read(path)
        except ValueError as error:
            assert str(error).startswith(str(path)), f"entropy {seed}"
            continue
        accepted += 1
        np.testing.assert_array_equal(got, np.load(path), err_msg=f"entropy {seed}")
    assert accepted > 0
