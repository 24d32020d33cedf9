"""``patch_torch()``: what it replaces, and that it is undone exactly when it should be."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch.utils.data
import torch.utils.data.dataloader

import minato
from minato.patch import Swaps

TORCHS = minato.DataLoader.__bases__[0]


def named() -> set[type]:
    return {torch.utils.data.DataLoader, torch.utils.data.dataloader.DataLoader}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    assert named() == {TORCHS}
    yield
    assert named() == {TORCHS}


def test_both_names_are_replaced_and_put_back() -> None:
    with minato.patch_torch():
        assert named() == {minato.DataLoader}
        from torch.utils.data import DataLoader

        assert DataLoader is minato.DataLoader
    assert named() == {TORCHS}


def test_as_a_function_until_undone() -> None:
    patch = minato.patch_torch()
    assert named() == {minato.DataLoader}
    patch.undo()
    patch.undo()
    assert named() == {TORCHS}


def test_undone_after_an_exception() -> None:
    with pytest.raises(KeyError), minato.patch_torch():
        raise KeyError
    assert named() == {TORCHS}


def test_a_block_does_not_undo_what_was_on_before() -> None:
    outer = minato.patch_torch()
    with minato.patch_torch(), minato.patch_torch():
        pass
    assert named() == {minato.DataLoader}
    outer.undo()


def test_loaders_work_while_patched() -> None:
    with minato.patch_torch():
        data = torch.utils.data.TensorDataset(torch.arange(6))
        loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=1)
        assert type(loader) is minato.DataLoader
        assert [b[0].tolist() for b in loader] == [[0, 1], [2, 3], [4, 5]]


def test_someone_elses_later_patch_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(TORCHS):
        pass

    with minato.patch_torch():
        monkeypatch.setattr(torch.utils.data, "DataLoader", Other)
    assert torch.utils.data.DataLoader is Other
    assert torch.utils.data.dataloader.DataLoader is TORCHS
    # what monkeypatch will put back is minato's; leave the world as it was
    monkeypatch.undo()
    torch.utils.data.DataLoader = TORCHS


def test_a_name_that_was_not_there_is_removed_again() -> None:
    class Owner:
        pass

    swaps = Swaps()
    swaps.acquire([(Owner, "name", 1)])
    assert Owner.name == 1
    swaps.release()
    assert not hasattr(Owner, "name") and not swaps.active
    swaps.release()
    assert not swaps.active


def test_threads_share_it() -> None:
    """While any thread is inside, all see minato's class."""
    inside = threading.Barrier(8)
    seen: list[set[type]] = []

    def use() -> None:
        for _ in range(50):
            with minato.patch_torch():
                inside.wait(60)
                seen.append(named())
                inside.wait(60)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 400 and all(names == {minato.DataLoader} for names in seen)
