"""Accelerate rebuilds the loaders it is given: with install(), as minato's."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import minato
from minato.integrations import accelerate as integration
from minato.integrations import own_options

from .conftest import Watch, loader, model, weights

accelerate = pytest.importorskip("accelerate")
library = pytest.importorskip("accelerate.data_loader")


@pytest.fixture(autouse=True)
def uninstalled() -> Iterator[None]:
    def replaced() -> tuple[Any, ...]:
        return (library.DataLoader, library._PYTORCH_DATALOADER_KWARGS,
                library.DataLoaderAdapter.__init__)  # fmt: skip

    before = replaced()
    yield
    integration.uninstall()
    assert replaced() == before


def prepared(given: Any) -> Any:
    return accelerate.Accelerator(cpu=True).prepare(given)


def sharded(given: Any) -> Any:
    """As the first of two processes would have it."""
    accelerate.Accelerator(cpu=True)
    return library.prepare_data_loader(given, num_processes=2, process_index=0)


def fit(kind: str) -> torch.Tensor:
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True)
    net = model()
    net, optimizer, batches = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.5), loader(kind)
    )
    for _epoch in range(2):
        for x, y in batches:
            optimizer.zero_grad()
            loss = torch.nn.functional.binary_cross_entropy_with_logits(net(x), y)
            accelerator.backward(loss)
            optimizer.step()
    return weights(net)


def test_a_rebuilt_loader_is_minatos() -> None:
    assert type(prepared(loader("minato")).base_dataloader) is not minato.DataLoader
    integration.install()
    assert type(prepared(loader("minato")).base_dataloader) is minato.DataLoader
    assert type(prepared(loader("torch")).base_dataloader) is minato.DataLoader


def test_minatos_options_are_kept() -> None:
    integration.install()
    given = loader("minato", scheduling="static", max_retries=0, memory_limit="1GiB")
    for again in (prepared(given), sharded(given), library.skip_first_batches(given, 2)):
        base = getattr(again, "base_dataloader", again)
        assert type(base) is minato.DataLoader
        for name in own_options():
            assert getattr(base, name) == getattr(given, name), name
        assert base.num_workers == 2 and base.persistent_workers


def test_options_used_by_accelerate_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"device": None, "scheduling": "balanced"}
    monkeypatch.setattr(integration, "own_options", lambda: options)
    assert integration._extra(library) == {"scheduling": "balanced"}


def test_fit_equals_torchs(watch: Watch) -> None:
    expected = fit("torch")
    watch.iterators.clear()
    integration.install()
    assert torch.equal(fit("minato"), expected)
    assert watch.all_ours()


def test_shards_and_skipped_batches_equal_torchs(watch: Watch) -> None:
    def batches(kind: str) -> list[list[float]]:
        given = loader(kind, shuffle=False)
        both = [*sharded(given), *library.skip_first_batches(given, 2)]
        return [x.reshape(-1).tolist() for x, _y in both]

    expected = batches("torch")
    watch.iterators.clear()
    integration.install()
    assert batches("minato") == expected
    assert watch.all_ours()


@pytest.mark.parametrize("rank", [0, 1])
def test_stateful_loader_resumes_each_rank_exactly(rank: int) -> None:
    accelerate.Accelerator(cpu=True)
    integration.install()

    def make() -> Any:
        torch.manual_seed(5)
        dataset = minato.TensorDataset(torch.arange(48.0))
        loader = library.prepare_data_loader(
            minato.DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2),
            num_processes=2, process_index=rank, put_on_device=False,
            use_seedable_sampler=True, use_stateful_dataloader=True,
        )  # fmt: skip
        loader.set_epoch(3)
        return loader

    loader = make()
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()
    again = make()
    assert again.use_stateful_dataloader
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.load_state_dict(state)
        rest = [x.tolist() for (x,) in again]
    assert rest == [x.tolist() for (x,) in batches]
    assert len(rest) == 4


def test_install_twice_uninstall_once() -> None:
    torchs = library.DataLoader
    integration.install()
    integration.install()
    assert library.DataLoader is minato.DataLoader
    integration.uninstall()
    assert library.DataLoader is torchs
    integration.uninstall()


def test_an_unknown_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(library, "_PYTORCH_DATALOADER_KWARGS")
    with pytest.raises(ImportError, match="does not support"):
        integration.install()
    monkeypatch.undo()
