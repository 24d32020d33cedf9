"""DataLoader(cache=): the samples of the loader without it, and each deterministic part made once."""

from __future__ import annotations

import logging
import os
import random
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import minato
from minato.cache.files import look, settled
from minato.commands.top import cached
from minato.iterators.stats import cache_words
from minato.observe.loader_report import page

from .support import Calls, new_cache

SAMPLES = 24


class Parts(torch.utils.data.Dataset[Any]):
    """Notes what it makes; its samples draw from every global generator."""

    def __init__(self, calls: Calls, scale: int = 2) -> None:
        self.calls = str(calls.path)
        self.paths = [f"sample {i}" for i in range(SAMPLES)]
        self.scale = scale

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, i: int) -> bytes:
        Calls(Path(self.calls)).note(f"read-{i}")
        return self.paths[i].encode() * 100

    def decode(self, raw: bytes, i: int) -> torch.Tensor:
        Calls(Path(self.calls)).note(f"decode-{i}")
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8)[:600].float() * self.scale

    def augment(self, value: torch.Tensor, i: int) -> Any:
        value += torch.rand(value.shape)  # in place: what is kept must not change
        return value, random.random() + np.random.rand(), i, self.paths[i]

    def __getitem__(self, i: int) -> Any:
        return self.augment(self.decode(self.read(i), i), i)


class Threaded(Parts):
    """With a generator for each thread, which the loader seeds."""

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls)
        self.own = threading.local()

    def seed_sample(self, seed: int) -> None:
        self.own.random = random.Random(seed)

    def augment(self, value: torch.Tensor, i: int) -> Any:
        return value, self.own.random.random(), i, self.paths[i]


def seed() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def epochs(loader: Any, number: int = 2) -> list[Any]:
    seed()
    return [batch for _ in range(number) for batch in loader]


def same(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) and torch.equal(a[2], b[2]) and a[3] == b[3]
        for a, b in zip(one, other)
    )  # fmt: skip


@pytest.fixture
def calls(tmp_path: Path) -> Calls:
    return Calls(tmp_path / "calls")


def count(calls: Calls, what: str) -> int:
    return sum(one.startswith(what) for one in calls.all())


KINDS: dict[str, dict[str, Any]] = {
    "inline": {"num_workers": 0},
    "inline, seeded": {"num_workers": 0, "seed_per_sample": True},
    "fork": {"num_workers": 2},
    "forkserver": {"num_workers": 1, "multiprocessing_context": "forkserver", "persistent_workers": True},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "static": {"num_workers": 2, "scheduling": "static"},
    "skip": {"num_workers": 2, "on_error": "skip"},
    "collate": {"num_workers": 2, "collate_fn": lambda samples: torch.utils.data.default_collate(samples)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_cached_samples_equal_those_without_cache(kind: str, calls: Calls) -> None:
    options: dict[str, Any] = {"batch_size": 5, "shuffle": True, **KINDS[kind]}
    plain = epochs(minato.DataLoader(Parts(calls), **options))
    calls.path.write_text("")
    loader = minato.DataLoader(Parts(calls), cache=new_cache(), cache_format="decoded", **options)
    assert same(epochs(loader), plain)
    assert (count(calls, "read"), count(calls, "decode")) == (SAMPLES, SAMPLES)
    found = loader.stats()["cache"]
    assert found is not None
    assert (found["misses"], found["hits"]) == (SAMPLES, SAMPLES)


def test_threads_read_through_the_cache(calls: Calls) -> None:
    options: dict[str, Any] = {"batch_size": 5, "num_workers": 2, "worker_type": "thread"}
    plain = epochs(minato.DataLoader(Threaded(calls), **options))
    calls.path.write_text("")
    loader = minato.DataLoader(Threaded(calls), cache=new_cache(), cache_format="decoded", **options)
    assert same(epochs(loader), plain)
    assert count(calls, "decode") == SAMPLES


class Observed(Threaded):
    """Notes which seed torch's global generator has while a value is made."""

    def decode(self, raw: bytes, i: int) -> torch.Tensor:
        Calls(Path(self.calls)).note(f"seed-{torch.initial_seed()}")
        return super().decode(raw, i)


def test_worker_threads_leave_the_programs_generators_alone(calls: Calls) -> None:
    seed()
    loader = minato.DataLoader(
        Observed(calls), 5, num_workers=2, worker_type="thread", cache=new_cache(), cache_format="decoded"
    )
    assert len(list(loader)) == 5
    assert {one for one in calls.all() if one.startswith("seed-")} == {"seed-0"}


def test_ready_batches_hold_each_sample_once(calls: Calls) -> None:
    loader = minato.DataLoader(
        Parts(calls), 5, num_workers=2, batching="ready", in_order=False, cache=new_cache()
    )
    for _ in range(2):
        assert sorted(i for batch in loader for i in batch[2].tolist()) == list(range(SAMPLES))


def test_encoded_form_reads_once_and_decodes_always(calls: Calls) -> None:
    plain = epochs(minato.DataLoader(Parts(calls), 5, num_workers=2))
    calls.path.write_text("")
    loader = minato.DataLoader(Parts(calls), 5, num_workers=2, cache=new_cache(), cache_format="encoded")
    assert same(epochs(loader), plain)
    assert (count(calls, "read"), count(calls, "decode")) == (SAMPLES, 2 * SAMPLES)


class Sized(Parts):
    """Decoded samples of 1 MiB that lie in storage as a few bytes."""

    def decode(self, raw: bytes, i: int) -> torch.Tensor:
        return torch.full((1 << 20,), i, dtype=torch.uint8)

    def augment(self, value: torch.Tensor, i: int) -> Any:
        return value[:4], i


@pytest.mark.parametrize(("size", "form", "level"), [("128MiB", "decoded", "INFO"),
                                                     ("16MiB", "encoded", "WARNING")])  # fmt: skip
def test_form_is_decoded_if_all_samples_fit(
    size: str, form: str, level: str, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    loader = minato.DataLoader(Sized(calls), 4, cache=new_cache(size))
    with caplog.at_level(logging.INFO, logger="minato"):
        for _ in range(2):
            list(loader)
    found = loader.stats()["cache"]
    assert found is not None and found["form"] == form
    assert found["decoded"] is not None and SAMPLES << 20 <= found["decoded"] < (SAMPLES << 20) * 1.01
    assert found["encoded"] is not None and found["encoded"] < 100 * 1024
    assert (found["misses"], found["stored"], found["hits"]) == (SAMPLES, SAMPLES, SAMPLES)
    told = [record for record in caplog.records if "24.0 MiB decoded" in record.getMessage()]
    assert [record.levelname for record in told] == [level]


def test_stats_with_form_estimate_nothing(calls: Calls) -> None:
    loader = minato.DataLoader(Sized(calls), 4, cache=new_cache("8MiB"), cache_format="decoded")
    list(loader)
    found = loader.stats()["cache"]
    assert found is not None and found["form"] == "decoded"
    assert found["refused"] == SAMPLES  # larger than a 16th of the cache
    assert found["lacking"] is None  # with cache_format= nothing is measured


def test_verdict_names_a_cache_that_is_too_small(calls: Calls) -> None:
    loader = minato.DataLoader(Sized(calls), 4, num_workers=1, cache=new_cache("80MiB"))
    list(loader)
    assert "no room" not in loader.stats()["verdict"]
    small = minato.DataLoader(Sized(calls), 4, num_workers=1, cache=new_cache("8MiB"), cache_format="decoded")
    list(small)
    told = small.stats()["verdict"]
    # as a cause of the wait, or in a sentence of its own
    assert re.search("no room for 24 of (24 values|them)", told) and "larger cache" in told


class Kept(Parts):
    """Of 60 KB in both forms, so that a cache of 1 MiB has room for some."""

    def read(self, i: int) -> bytes:
        return bytes(15000)

    def decode(self, raw: bytes, i: int) -> torch.Tensor:
        return torch.full((15000,), i, dtype=torch.uint8)

    def augment(self, value: torch.Tensor, i: int) -> Any:
        return value[:4], i

    def __len__(self) -> int:
        return 200


def test_small_cache_stats_name_lacking_bytes(calls: Calls) -> None:
    loader = minato.DataLoader(Kept(calls), 10, cache=new_cache("1MiB"))
    list(loader)
    list(loader)
    found = loader.stats()["cache"]
    assert found is not None and found["refused"] > 0
    assert found["lacking"] is not None
    assert 3.1 * 1024**2 <= found["lacking"] + found["bytes"] <= 3.4 * 1024**2
    assert found["would_save"] is not None and found["would_save"] > 0
    told = loader.stats()["verdict"]
    assert re.search(r'it has no room for \d+ of them. minato.Cache\("3\.[1-4] MiB"\) would keep all', told)
    assert re.search("^cache .*found, .* of 1.0 MiB", page("x", dict(loader.stats())), re.M)


def test_verdict_proposes_a_cache_where_it_would_help(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def advised(dataset: Any) -> str:
        loader = minato.DataLoader(dataset, 4)
        for _batch in loader:
            pass
        stats: Any = dict(loader.stats())
        stats["causes"] = [{"name": "slow storage"}]
        return cache_words(loader, stats)

    assert "would keep the deterministic part" in advised(Parts(calls))
    assert advised(Whole()) == ""
    monkeypatch.setattr("minato.iterators.stats.CORE", False)  # as on another system
    assert advised(Parts(calls)) == ""


def test_top_shows_the_caches_of_a_process(calls: Calls) -> None:
    loader = minato.DataLoader(Parts(calls), 5, cache=new_cache("9MiB"), cache_format="decoded")
    list(loader)
    list(loader)
    lines = [line for line in cached(os.getpid()) if "50% of 48 values found" in line]
    [line] = [line for line in lines if "of 9.0 MiB used, by 1 job" in line]
    assert line.startswith("  cache    ")


# ---- what a sample depends on --------------------------------------------------------------


def test_equal_datasets_of_two_loaders_share_samples(calls: Calls) -> None:
    cache = new_cache()
    for workers in (0, 2):
        loader = minato.DataLoader(Parts(calls), 5, num_workers=workers, cache=cache, cache_format="decoded")
        list(loader)
    assert count(calls, "decode") == SAMPLES


class Odd(Parts):
    """It reads with an object that no key can hold."""

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls)
        self.reader = threading.local()

    def read(self, i: int) -> bytes:
        assert self.reader is not None
        return super().read(i)


class Keyed(Odd):
    def cache_key(self, i: int) -> Any:
        return self.paths[i % 4], i % 4

    def augment(self, value: torch.Tensor, i: int) -> Any:
        return value, i


def test_an_attribute_without_a_key_is_named(calls: Calls) -> None:
    loader = minato.DataLoader(Odd(calls), 5, cache=new_cache())
    with pytest.raises(TypeError, match=r"they use self\.reader, .*_thread\._local .*cache_key\(self, i\)"):
        list(loader)


def test_cache_key_replaces_the_attributes(calls: Calls) -> None:
    loader = minato.DataLoader(Keyed(calls), 5, num_workers=2, cache=new_cache(), cache_format="decoded")
    list(loader)
    assert count(calls, "decode") == 4


def settle(paths: list[str]) -> None:
    """A file that was written just now is not trusted: waits until these are."""
    while not settled(look(path) for path in paths):
        time.sleep(0.01)


class OfFiles(Parts):
    def __init__(self, calls: Calls, folder: Path) -> None:
        super().__init__(calls)
        self.paths = [str(folder / f"{i}.bin") for i in range(SAMPLES)]

    def read(self, i: int) -> bytes:
        Calls(Path(self.calls)).note(f"read-{i}")
        return Path(self.paths[i]).read_bytes()

    def cache_files(self, i: int) -> str:
        return self.paths[i]


def test_a_changed_file_is_read_again(calls: Calls, tmp_path: Path) -> None:
    dataset = OfFiles(calls, tmp_path)
    for path in dataset.paths:
        Path(path).write_bytes(b"old" * 200)
    cache = new_cache()
    loader = minato.DataLoader(dataset, 5, num_workers=2, cache=cache, cache_format="decoded")
    settle(dataset.paths)
    list(loader)
    Path(dataset.paths[7]).write_bytes(b"new" * 200)
    found = torch.cat([batch[2] for batch in loader])
    assert len(found) == SAMPLES
    assert count(calls, "read-") == SAMPLES + 1 and calls.all().count("read-7") == 2


# ---- subsets, resuming -------------------------------------------------------------------------


def test_subsets_and_concatenated_datasets_are_read_through(calls: Calls) -> None:
    whole = torch.utils.data.ConcatDataset([Parts(calls), Parts(calls, 3)])
    subset = torch.utils.data.Subset(whole, list(range(0, 2 * SAMPLES, 3)))
    for options in ({"num_workers": 0}, {"num_workers": 2}, {"num_workers": 2, "scheduling": "static"}):
        settings: Any = {"batch_size": 5, "shuffle": True, **options}
        plain = epochs(minato.DataLoader(subset, **settings))
        calls.path.write_text("")
        loader = minato.DataLoader(subset, cache=new_cache(), cache_format="decoded", **settings)
        assert same(epochs(loader), plain)
        assert count(calls, "decode") == len(subset)


def test_a_resumed_epoch_goes_on_through_the_cache(calls: Calls) -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_workers": 2}
    plain = epochs(minato.DataLoader(Parts(calls), **options), 1)
    loader = minato.DataLoader(Parts(calls), cache=new_cache(), **options)
    seed()
    batches = iter(loader)
    first = [next(batches) for _ in range(2)]
    state = loader.state_dict()
    again = minato.DataLoader(Parts(calls), cache=new_cache(), **options)
    again.load_state_dict(state)
    assert same(first + list(again), plain)


# ---- what is refused -----------------------------------------------------------------------------


class Whole(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> int:
        return i


class Half(Whole):
    def read(self, i: int) -> int:
        return i

    def augment(self, value: int, i: int) -> int:
        return value


class Batched(Parts):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[i] for i in indices]


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(3))


def test_a_dataset_without_the_methods_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Whole does not say it\. .*read\(self, i\).*memoize"):
        minato.DataLoader(Whole(), cache="8MiB")
    with pytest.raises(TypeError, match="Half has read and augment, but no decode"):
        minato.DataLoader(torch.utils.data.Subset(Half(), [0]), cache="8MiB")


def test_options_that_would_have_no_effect_are_refused(calls: Calls) -> None:
    with pytest.raises(ValueError, match="no effect without cache="):
        minato.DataLoader(Parts(calls), cache_format="decoded")
    with pytest.raises(ValueError, match="None, 'decoded' or 'encoded'"):
        minato.DataLoader(Parts(calls), cache="8MiB", cache_format="raw")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="iterable dataset.*memoize"):
        minato.DataLoader(Stream(), cache="8MiB")
    with pytest.raises(TypeError, match="has __getitems__"):
        minato.DataLoader(Batched(calls), cache="8MiB")
    with pytest.raises(ValueError, match="at least '1MiB'"):
        minato.DataLoader(Parts(calls), cache="8")
    with pytest.raises(TypeError, match="None, a size such as '16GiB' or a minato.Cache"):
        minato.DataLoader(Parts(calls), cache=1.5)  # type: ignore[arg-type]


def test_unusable_cache_folder_disables_cache(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = epochs(minato.DataLoader(Parts(calls), 5))
    monkeypatch.setattr("minato.cache.cache.MEMORY", "/dev/shm/minato-test-there-is-none")
    loader = minato.DataLoader(Parts(calls), 5, cache=new_cache())
    with pytest.warns(UserWarning, match="minato.Cache is off"):
        assert same(epochs(loader), plain)
    found = loader.stats()["cache"]
    assert found is not None and found["off"] and found["hits"] == 0


def test_a_sample_that_fails_raises_its_error(calls: Calls) -> None:
    class Failing(Parts):
        def decode(self, raw: bytes, i: int) -> torch.Tensor:
            if i == 0:
                raise OSError("sample 0 is broken")
            return super().decode(raw, i)

    loader = minato.DataLoader(Failing(calls), 5, num_workers=2, cache=new_cache())
    with pytest.raises(OSError, match="sample 0 is broken"):
        list(loader)
    loader = minato.DataLoader(Failing(calls), 5, num_workers=2, cache=new_cache(), on_error="skip")
    with pytest.warns(UserWarning, match="1 sample of this epoch"):
        assert sum(len(batch[2]) for batch in loader) == SAMPLES - 1
