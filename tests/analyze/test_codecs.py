"""``--codecs``: what other codecs would do to the images that samples read."""

from __future__ import annotations

import io
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

pytest.importorskip("PIL")

from PIL import Image, ImageFilter

from minato import ops
from minato.analyze import keeper, loaders, report, work
from minato.analyze.advice import candidates
from minato.analyze.codecs import codec_rate, winners
from minato.analyze.facts import Facts
from minato.analyze.recode import Settings
from minato.analyze.records import CodecRow, RateRequest, Request, parse
from minato.analyze.report import page

from .photos import folder_of, photo
from .support import in_a_fork
from .support import study as run_study
from .test_limits import facts
from .test_page import whole

pytestmark = pytest.mark.limit(240)


class Photos(Dataset[torch.Tensor]):
    """How samples come to their pixels is a function of the file's path."""

    def __init__(self, folder: Path, read: Any) -> None:
        self.paths, self.read = sorted(folder.rglob("*.*")), read

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(np.array(self.read(self.paths[index])))


def resized(path: Path) -> Any:
    with Image.open(path) as image:
        return image.convert("RGB").resize((64, 64))


def shrunk(path: Path) -> Any:
    image = Image.open(io.BytesIO(path.read_bytes())).convert("RGB")
    image.thumbnail((100, 80))
    return image


def cropped(path: Path) -> Any:
    with Image.open(path) as image:
        return image.convert("RGB").crop((10, 10, 60, 60)).resize((64, 64))


def held(path: Path, content: bytes = b"") -> Any:
    return Image.open(io.BytesIO(content)).convert("RGB")


def only_jpeg(path: Path) -> Any:
    with Image.open(path) as image:
        assert image.format in ("JPEG", "PPM", "PNG"), "no JPEG"
        return image.convert("RGB")


def measured(folder: Path, read: Any, seconds: float = 1.0) -> Any:
    told: list[dict[str, Any]] = []
    loader: Any = DataLoader(Photos(folder, read), 2)

    def run() -> dict[str, Any]:
        keeper.run(Request("codecs", seconds), loader, lambda found: told.append(asdict(found)))
        return told[-1]

    return in_a_fork(run)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("photos"), 6, width=160, height=120)


def test_each_codec_is_measured_on_samples(photos: Path) -> None:
    found = measured(photos, resized)
    rows = {row["name"]: row for row in found["rows"]}
    assert found["images"] >= 4 and found["folder"] == str(photos) and found["size"] == 64
    assert rows["jpeg 50"]["bytes"] < rows["jpeg 75"]["bytes"] < rows["jpeg 85"]["bytes"]
    assert rows["jpeg 50"]["psnr"] < rows["jpeg 85"]["psnr"] < rows["jpeg 95"]["psnr"]
    assert rows["jpeg 50"]["worst"] <= rows["jpeg 50"]["psnr"]
    assert rows["png"]["psnr"] is None and rows["raw"]["psnr"] is None
    assert rows["raw"]["bytes"] == pytest.approx(64 * 85 * 3 + 13)
    assert all(row["wall"] > 0 and not row["error"] for row in rows.values())


def blurred_first(path: Path) -> Any:
    image = Image.open(path).convert("RGB").crop((0, 0, 160, 120))
    return image.filter(ImageFilter.GaussianBlur(1)).resize((40, 30))


def cropped_first(path: Path) -> Any:
    return Image.open(path).convert("RGB").crop((0, 0, 160, 120)).resize((40, 30))


@pytest.mark.parametrize("read, size", [(shrunk, 75), (cropped, None), (blurred_first, None), (cropped_first, 30)])
def test_size_advice_fits_sample_size(read: Any, size: int | None, photos: Path) -> None:
    """Images keep their size where work comes before resizing."""
    assert measured(photos, read)["size"] == size


def test_a_decoder_that_fails_is_named(photos: Path) -> None:
    rows = {row["name"]: row for row in measured(photos, only_jpeg)["rows"]}
    assert "AssertionError: no JPEG" in rows["webp 85"]["error"] and not rows["jpeg 85"]["error"]


def test_palette_images_are_skipped_as_labels(tmp_path: Path) -> None:
    for n in range(4):
        photo(n, 64, 48).save(tmp_path / f"{n}.jpg")
        photo(n, 64, 48).convert("P").save(tmp_path / f"{n}.png")
    found = measured(tmp_path, resized, 10.0)
    assert found["skipped"] == 4 and found["images"] == 4 and found["size"] is None


def test_images_from_containers_are_noticed(photos: Path) -> None:
    content = next(photos.rglob("*.jpg")).read_bytes()
    found = measured(photos, lambda path: held(path, content))
    assert found["images"] == 0 and found["containers"] > 0
    f = Facts(facts(codecs=found))
    assert any("out of containers" in line for line in candidates(f)[1])


@pytest.mark.parametrize("kind", ["torch", "minato"])
def test_a_check_reads_encoded_images(kind: str, photos: Path) -> None:
    """Workers, too: a sample is the number of bytes that it has read."""

    class Sizes(Photos):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor(len(self.paths[index].read_bytes()))

    def sizes(workers: int, **more: Any) -> list[int]:
        loader: Any = DataLoader(Sizes(photos, None), 2, num_workers=workers)
        made = iter(loaders.rebuild(loader, RateRequest(kind, workers, **more)))
        return [int(size) for _ in range(3) for size in next(made)]

    plain = sizes(0)
    given = Settings("jpeg", 50, 32)
    small = in_a_fork(lambda: sizes(1, codec=given))
    assert len(small) == len(plain) == 6 and all(a < b / 3 for a, b in zip(small, plain))
    assert small == in_a_fork(lambda: sizes(0, codec=given))


# ---- from numbers to a recommendation --------------------------------------------------------


def row(name: str, size: float, wall: float, psnr: float | None, **more: Any) -> dict[str, Any]:
    format, _, quality = name.partition(" ")
    return {"name": name, "bytes": size, "decode": wall, "wall": wall, "cpu": wall, "psnr": psnr,
            "worst": psnr and psnr - 2, "error": "",
            "format": format if quality or name == "png" else None,
            "quality": int(quality) if quality.isdecimal() else None, **more}  # fmt: skip


def of_photos(size: int | None = None, **more: Any) -> dict[str, Any]:
    rows = [row("as it is", 100e3, 0.010, None), row("jpeg 95", 90e3, 0.008, 44.0),
            row("jpeg 85", 40e3, 0.006, 38.0), row("jpeg 75", 30e3, 0.0059, 36.0),
            row("jpeg 50", 10e3, 0.004, 33.0), row("webp 85", 35e3, 0.016, 39.0),
            row("webp 75", 25e3, 0.012, 37.8), row("png", 300e3, 0.02, None), row("raw", 600e3, 0.003, None)]  # fmt: skip
    rows[0].update(format=None, quality=None)
    return {"rows": rows, "images": 32, "files": 32, "containers": 0, "size": size,
            "skipped": 0, "folder": "/data/my photos", "per_sample": 1.0, **more}  # fmt: skip


def test_chosen_codec_loses_little() -> None:
    """JPEG 50 is faster and never recommended; JPEG 75 is hardly faster than 85."""
    helps, _ = candidates(Facts(facts(codecs=of_photos(size=256))))
    [found] = [change for change in helps if change.what.startswith("images as")]
    assert found.what == "images as jpeg 85, shorter side 256"
    assert found.paste == (
        "minato recode '/data/my photos' '/data/my photos-jpeg85-256' --format jpeg --quality 85 --size 256"
    )
    assert found.predicted == pytest.approx(200 / 0.6) and "worst image 36.0 dB" in found.data
    helps, _ = candidates(Facts(facts(codecs=of_photos(lossless=True))))
    assert [h.paste.endswith(" --lossy") for h in helps if h.what.startswith("images as")] == [True]
    bad = of_photos()
    for each in bad["rows"][1:]:
        each["worst"] = 29.0
    _, useless = candidates(Facts(facts(codecs=bad)))
    assert any("loses more than 30 dB" in line for line in useless)


def test_of_equal_codecs_one_with_little_cpu_is_chosen() -> None:
    """Both wait for the same storage, and WebP loses less, but takes more CPU time."""
    photos = of_photos()
    rows = {each["name"]: each for each in photos["rows"]}
    rows["jpeg 75"].update(wall=0.005, cpu=0.003)
    rows["webp 75"].update(wall=0.005, cpu=0.0045)
    helps, _ = candidates(Facts(facts(codecs=photos)))
    assert [one.what for one in helps if "images" in one.what] == ["images as jpeg 75"]
    rows["webp 75"].update(cpu=0.0035)
    helps, _ = candidates(Facts(facts(codecs=photos)))
    assert [one.what for one in helps if "images" in one.what] == ["images as webp 75"]


def test_the_fastest_codec_depends_on_storage() -> None:
    assert [codec for _, codec, _ in winners(Facts(facts(codecs=of_photos())))] == [
        "webp 75", "jpeg 85", "raw", "raw"
    ]  # fmt: skip


def test_waits_for_a_shared_storage_set_the_rate() -> None:
    """Two workers, one read of 10 ms at a time: 100 samples/s; a quarter of the bytes, 400."""
    was, new = row("as it is", 100e3, 0.0, None), row("jpeg 85", 25e3, 0.0, 38.0)
    was.update(wall=0.011, cpu=0.001)
    new.update(wall=0.0035, cpu=0.001)
    found = facts(codecs={**of_photos(), "rows": [was, new]}, rates={("torch", 2): 100.0})
    assert codec_rate(Facts(found), parse(CodecRow, new)) == pytest.approx(400)
    assert codec_rate(Facts(found), parse(CodecRow, new), 5e6) == pytest.approx(200)


def test_answers_and_pages_have_a_table() -> None:
    found = whole(codecs=of_photos(size=256))
    said = report.answer(found)
    assert "disk, 23 MB/s: jpeg 85" in said
    text = page(found)
    assert "<h2>Codecs</h2>" in text and "<h2>Codecs on other storages</h2>" in text
    assert "38.0 dB, worst 36.0" in text and "256 pixels" in text


def test_a_program_gets_the_line_to_paste(photos: Path, tmp_path: Path) -> None:
    done, found = run_study(tmp_path, f"""
        import numpy, pathlib, time, torch
        from PIL import Image
        from torch.utils.data import DataLoader, Dataset

        class Photos(Dataset):
            paths = sorted(pathlib.Path({str(photos)!r}).rglob("*.jpg"))
            def __len__(self):
                return len(self.paths)
            def __getitem__(self, index):
                for _ in range(4):  # as if it were large
                    image = Image.open(self.paths[index]).convert("RGB").resize((32, 32))
                return torch.from_numpy(numpy.array(image))

        loader = DataLoader(Photos(), 2)
        for _ in range(15):
            for batch in loader:
                pass
        """, "--codecs")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert found["codecs"]["images"] >= 4 and found["codecs"]["size"] == 32
    assert f"minato recode {photos} {photos}-" in done.stdout, done.stdout
    [change] = [each for each in found["helps"] if each["what"].startswith("images as")]
    assert change["gain"] > 1.2


def test_usual_transforms_are_timed_with_minatos(tmp_path: Path) -> None:
    datasets = pytest.importorskip("torchvision.datasets", exc_type=ImportError)
    from torchvision import transforms

    folder = folder_of(tmp_path / "photos", 12)
    usual = transforms.Compose([transforms.RandomResizedCrop(32), transforms.ToTensor()])
    dataset = datasets.ImageFolder(folder, usual)
    seconds = work._photos_seconds(DataLoader(dataset), work.clock() + 1.0)
    assert seconds is not None and seconds > 0
    request = RateRequest("own", 1, photos=True)
    made = loaders.rebuild(DataLoader(dataset, num_workers=1), request)
    assert type(made.dataset) is ops.ImageFolder
    dataset.transform = transforms.Compose([transforms.ToTensor()])
    assert work.native_photos(DataLoader(dataset)) is None
