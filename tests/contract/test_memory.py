"""Tensors of batches stay valid whatever their holder and the loader do next."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from typing import Any, Callable

import numpy as np
import pytest
import torch
import torch.multiprocessing

from .datasets import Images, Listed
from .support import Kind, assert_same


def _want(batch_number: int, size: int = 2) -> list[int]:
    return [batch_number * size + i for i in range(size)]


def _values(image: torch.Tensor) -> list[int]:
    low, high = image.amin(dim=(1, 2, 3)), image.amax(dim=(1, 2, 3))
    assert torch.equal(low, high), "bytes of another batch"
    return [int(value) for value in low]


def _churn(loader: Kind, epochs: int = 1) -> None:
    """Runs a loader of the same shapes over memory that was freed in the meantime."""
    for _ in range(epochs):
        for batch in loader(Images(12), batch_size=2, num_workers=2):
            batch["image"].fill_(-7)


def test_batches_kept_for_an_epoch(loader: Kind) -> None:
    made = loader(Images(60), batch_size=2, num_workers=2)
    kept = list(made)
    _churn(loader)
    for number, batch in enumerate(kept):
        assert _values(batch["image"]) == batch["label"].tolist() == _want(number)


def test_batches_outlive_their_loader(loader: Kind) -> None:
    made = loader(Images(12), batch_size=2, num_workers=2, persistent_workers=True)
    kept = list(made)
    del made
    gc.collect()
    _churn(loader)
    for number, batch in enumerate(kept):
        assert _values(batch["image"]) == _want(number)


def test_every_other_batch_is_kept(loader: Kind) -> None:
    kept = {}
    made = loader(Images(40), batch_size=2, num_workers=2, persistent_workers=True)
    for epoch in range(3):
        for number, batch in enumerate(made):
            if (number + epoch) % 3 == 0:
                kept[epoch, number] = batch["image"]
    for (_, number), image in kept.items():
        assert _values(image) == _want(number)


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    return memoryview(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    tensor.share_memory_()
    assert tensor.is_shared()
    return tensor


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda t: t,
    "view": lambda t: t.view(torch.int32),
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "dlpack": lambda t: torch.from_dlpack(t),
    "storage": lambda t: t.untyped_storage(),
    "memoryview": lambda t: memoryview(t.numpy()),
    "array": lambda t: np.asarray(t).view(np.uint8),
    "part of an array": lambda t: t.numpy()[:, :, ::2],
    "parameter": lambda t: torch.nn.Parameter(t),
    "strided": lambda t: t[0, 0, 0].as_strided((5,), (1,)),
    "one row": lambda t: t[1],
    "shared": _shared,
    # share_memory_() may move a tensor; a NumPy view taken before stays where it was
    "array of a tensor that is shared then": lambda t: (t.numpy(), t.share_memory_())[0],
}


def test_other_holders_of_the_memory(loader: Kind) -> None:
    """Each batch is kept in one of these ways alone."""
    made = loader(Images(2 * len(HOLDERS)), batch_size=2, num_workers=2, persistent_workers=True)
    held = []
    for _ in range(3):
        for name, batch in zip(HOLDERS, made, strict=True):
            held.append((name, HOLDERS[name](batch["image"]), batch["image"].clone()))
            del batch
    gc.collect()
    _churn(loader)
    for name, view, image in held:
        want = HOLDERS[name](image.share_memory_())  # moved before a view is taken
        if isinstance(view, torch.UntypedStorage):
            assert bytes(_bytes_of(view)) == bytes(_bytes_of(want))
        elif isinstance(view, memoryview):
            assert view.tobytes() == want.tobytes()
        else:
            assert bool((view == want).all()), name


def _sums(queue: Any, answers: Any, count: int) -> None:
    for _ in range(count):
        batch = queue.get()
        answers.put((batch["image"].sum().item(), batch["label"].tolist()))
    answers.close()
    answers.join_thread()


def test_multiprocessing_queue(loader: Kind) -> None:
    context = torch.multiprocessing.get_context("fork")
    queue, answers = context.Queue(), context.Queue()
    process = context.Process(target=_sums, args=(queue, answers, 12))
    process.start()
    found = []
    for _ in range(2):
        for batch in loader(Images(12), batch_size=2, num_workers=1):
            queue.put(batch)
            # The reader answers before the batch is dropped here.
            found.append(answers.get(timeout=90))
    process.join(90)
    assert process.exitcode == 0
    pixels = 3 * 64 * 64
    assert found == [(sum(_want(n % 6)) * pixels, _want(n % 6)) for n in range(12)]


def _read_later(queue: Any, answers: Any, gate: Any, count: int) -> None:
    gate.wait(90)
    found = []
    for _ in range(count):
        batch = queue.get()
        found.append((_values(batch["image"]), batch["label"].tolist()))
    answers.put(found)
    answers.close()
    answers.join_thread()


def test_batches_that_wait_in_a_queue(loader: Kind) -> None:
    """They are dropped here at once, and others replace them before they are read."""
    context = torch.multiprocessing.get_context("fork")
    queue, answers, gate = context.Queue(), context.Queue(), context.Event()
    process = context.Process(target=_read_later, args=(queue, answers, gate, 24))
    process.start()
    made = loader(Images(24), batch_size=2, num_workers=1, persistent_workers=True)
    for _ in range(2):
        for batch in made:
            queue.put(batch)
            del batch
    for batch in made:
        batch["image"].fill_(-7)
    _churn(loader)
    gate.set()
    found = answers.get(timeout=90)
    process.join(90)
    assert process.exitcode == 0
    assert found == [(_want(n % 12), _want(n % 12)) for n in range(24)]


def test_writes_of_forked_child_are_seen(loader: Kind) -> None:
    """Batches are shared memory, whatever is_shared() says of it: also where a worker's are."""
    made = loader(Images(8), batch_size=2, num_workers=1, persistent_workers=True)
    for batch in made:  # the first ones may be copies
        pass
    batch = next(iter(made))
    process = torch.multiprocessing.get_context("fork").Process(
        target=batch["image"].fill_, args=(5,)
    )
    process.start()
    process.join(90)
    assert process.exitcode == 0
    assert _values(batch["image"]) == [5, 5]


def test_queue_within_one_process(loader: Kind) -> None:
    queue = torch.multiprocessing.get_context("fork").Queue()
    for number, batch in enumerate(loader(Images(8), batch_size=2, num_workers=1)):
        queue.put(batch["image"])
        assert _values(queue.get(timeout=90)) == _want(number)
        assert _values(batch["image"]) == _want(number)
    queue.close()
    queue.join_thread()


def test_tensor_pickles_stay_near_tensor_size(loader: Kind) -> None:
    for batch in loader(Images(8), batch_size=2, num_workers=1):
        for tensor in batch.values():
            size = tensor.numel() * tensor.element_size()
            text = pickle.dumps(tensor)
            assert len(text) < size + 2048
            assert_same(pickle.loads(text), tensor)
            file = io.BytesIO()
            torch.save(tensor, file)
            assert file.tell() < size + 4096
            file.seek(0)
            assert_same(torch.load(file), tensor)
            assert_same(copy.deepcopy(tensor), tensor)


def test_each_tensor_owns_its_storage(loader: Kind) -> None:
    kept = list(loader(Images(12), batch_size=2, num_workers=2))
    places = set()
    for batch in kept:
        for tensor in batch.values():
            storage = tensor.untyped_storage()
            if loader.expects("every_tensor_owns_its_storage"):
                assert storage.nbytes() == tensor.numel() * tensor.element_size()
                assert tensor.storage_offset() == 0
            places.add(storage.data_ptr())
    assert len(places) == 2 * len(kept)


def test_alignment_and_layout(loader: Kind) -> None:
    samples = [{"a": torch.ones(5, dtype=torch.int8), "b": torch.ones(3)}] * 4
    for batch in loader(Listed(samples), batch_size=2, num_workers=1):
        for tensor in batch.values():
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % tensor.element_size() == 0


def test_batches_may_be_written(loader: Kind) -> None:
    made = loader(Images(8), batch_size=2, num_workers=2, persistent_workers=True)
    for _ in range(3):
        for number, batch in enumerate(made):
            image = batch["image"]
            assert image.numpy().flags.writeable
            assert _values(image) == _want(number)
            image.mul_(0).sub_(1)
            batch["label"].zero_()
            image.requires_grad_()


def test_batches_may_be_resized(loader: Kind) -> None:
    for number, batch in enumerate(loader(Images(8), batch_size=2, num_workers=1)):
        image = batch["image"]
        try:
            image.resize_(4, 3, 64, 64)[2:] = 5
        except RuntimeError as error:
            # Shared memory cannot grow; torch refuses, and so may others.
            assert "not resizable" in str(error)
        else:
            assert _values(image) == [*_want(number), 5, 5]
        image.resize_(1, 3, 64, 64)
        assert _values(image) == _want(number)[:1]
        batch["label"].set_(torch.arange(3))
        assert batch["label"].tolist() == [0, 1, 2]


def _read(image: torch.Tensor, answers: Any) -> None:
    answers.put(_values(image))
    answers.close()
    answers.join_thread()


def test_forked_child_of_the_caller_sees_its_copy(loader: Kind) -> None:
    context = torch.multiprocessing.get_context("fork")
    answers = context.Queue()
    iterator = iter(loader(Images(20), batch_size=2, num_workers=2))
    image = next(iterator)["image"]
    process = context.Process(target=_read, args=(image, answers))
    process.start()
    assert answers.get(timeout=90) == [0, 1]
    process.join(90)
    # The child's end frees nothing here.
    assert process.exitcode == 0
    rest = [_values(batch["image"]) for batch in iterator]
    assert rest == [_want(number) for number in range(1, 10)]
    assert _values(image) == [0, 1]


def test_dataset_tensors_are_not_delivered_themselves(loader: Kind) -> None:
    dataset = Listed([torch.zeros(1000) for _ in range(6)])
    made = loader(dataset, batch_size=2, num_workers=1, persistent_workers=True)
    for _ in range(2):
        for batch in made:
            assert batch.sum() == 0
            batch += 1
    assert sum(sample.sum() for sample in dataset.samples) == 0


def test_unbatched_tensors_and_the_dataset(loader: Kind) -> None:
    dataset = Listed([torch.zeros(1000) for _ in range(6)])
    made = loader(dataset, batch_size=None, num_workers=1, persistent_workers=True)
    kept = []
    for _ in range(3):
        for sample in made:
            kept.append(sample.add_(1))
    written = all(sample.sum() == 1000 for sample in kept)
    assert written is not loader.expects("unbatched_tensors_alias_the_dataset")


@pytest.mark.parametrize("side", [1, 8, 150, 600])
def test_sizes_small_and_large(loader: Kind, side: int) -> None:
    made = loader(Images(8, side), batch_size=2, num_workers=2)
    kept = [batch["image"] for batch in made]
    assert [_values(image) for image in kept] == [_want(n) for n in range(4)]


def test_autograd_on_a_batch(loader: Kind) -> None:
    weight = torch.ones(1, requires_grad=True)
    total = 0.0
    loss = torch.zeros(())
    for batch in loader(Images(6), batch_size=2, num_workers=1):
        # Saved for the backward pass; the loader continues meanwhile.
        loss = loss + (batch["image"] * weight).sum()
        total += batch["image"].sum().item()
    loss.backward()
    assert weight.grad.item() == total
