"""Images in folders and in tar shards."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from launch_train.common.config import Data, Loader, parse
from launch_train.common.errors import UsageError
from launch_train.data import open_data
from launch_train.data.image_index import holds_images, listed, scanned
from launch_train.data.images import Pictures, decoded, random_crop
from launch_train.data.loader import BatchLoader
from launch_train.data.sample_order import generator, share
from launch_train.distributed.process_group import Ranks

CPU = torch.device("cpu")


def picture(number: int, kind: str = "jpeg", size: tuple[int, int] = (60, 40)) -> bytes:
    """Noise around a colour of its own."""
    noise = np.random.default_rng(number).integers(0, 30, (size[1], size[0], 3)) + number * 7 % 200
    buffer = io.BytesIO()
    Image.fromarray(noise.astype(np.uint8)).save(buffer, kind)
    return buffer.getvalue()


def folders(root: Path, classes: tuple[str, ...] = ("cat", "dog"), count: int = 10) -> Path:
    for number, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for at in range(count):
            kind = ("jpeg", "png", "webp")[at % 3]
            (root / name / f"{at}.{kind}").write_bytes(picture(100 * number + at, kind))
    (root / classes[0] / "notes.txt").write_text("no image")
    (root / classes[0] / ".hidden.jpg").write_text("no image")
    return root


def packed(path: Path, files: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def shard(path: Path, count: int = 10, first: int = 0, labels: str = "cls") -> Path:
    files = dict[str, bytes]()
    for number in range(first, first + count):
        label = str(number % 3) if labels == "cls" else json.dumps({"label": number % 3, "key": "x"})
        files |= {f"n/{number:04}.jpg": picture(number), f"n/{number:04}.{labels}": label.encode()}
    return packed(path, files)


def config(path: Path, classes: int = 2, **more: Any) -> Any:
    model = {"name": "resnet50", "num_classes": classes, "image_size": 32, "width": 4}
    return parse({"model": model, "data": str(path), "batch_size": 4, **more})


def test_a_folder_of_classes(tmp_path: Path) -> None:
    source = open_data(config(folders(tmp_path / "images")), Ranks())
    images, labels = source.finish(source.train(1, slice(0, 4)))
    assert (images.shape, images.dtype, images.is_contiguous()) == ((4, 3, 32, 32), torch.float32, True)
    assert labels.dtype == torch.int64
    assert -3 < images.min() < images.max() < 3
    facts = source.facts
    assert (facts["data_samples"], facts["data_held_out_samples"], facts["data_classes"]) == (18, 2, 2)
    assert facts["epochs"] == round(300 * 4 / 18, 3)
    assert (source.unit, source.per_sample, source.vocab_size, source.slow) == ("images", 1, None, True)


def test_what_is_held_out_is_never_trained_with(tmp_path: Path) -> None:
    source: Any = open_data(config(folders(tmp_path / "images")), Ranks())
    trained = {source._train.where(index) for index in range(18)}
    held_out = {source._held_out.where(index) for index in range(2)}
    assert len(trained) == 18
    assert len(held_out) == 2
    assert not trained & held_out
    seen = {place for step in range(1, 10) for place in source.drawn(step)}
    assert seen == set(range(18))


@pytest.mark.parametrize("name", ["val", "validation", "eval"])
def test_a_folder_beside_train_is_what_is_held_out(tmp_path: Path, name: str) -> None:
    folders(tmp_path / "images" / "train")
    folders(tmp_path / "images" / name, count=3)
    source: Any = open_data(config(tmp_path / "images"), Ranks())
    assert (source.facts["data_samples"], source.facts["data_held_out_samples"]) == (20, 6)
    assert all(f"/{name}/" in source._held_out.where(index) for index in range(6))
    labels = [source.held_out(index, 2, slice(0, 4))[1].tolist() for index in range(2)]
    assert sorted(labels[0] + labels[1])[:3] == [0, 0, 0]


def test_validation_images_may_be_anywhere(tmp_path: Path) -> None:
    folders(tmp_path / "big")
    folders(tmp_path / "small", count=3)
    data = {"train": str(tmp_path / "big"), "val": str(tmp_path / "small")}
    source = open_data(config(tmp_path / "big")._replace(data=Data(path=data["train"], val=data["val"])), Ranks())
    labels = [source.held_out(index, 2, slice(0, 4))[1].tolist() for index in range(2)]
    assert sorted(labels[0] + labels[1])[:3] == [0, 0, 0]
    folders(tmp_path / "small", ("cow",))
    with pytest.raises(UsageError, match=r"the class cow is in only one of .*big and .*small"):
        open_data(config(tmp_path / "big")._replace(data=Data(path=data["train"], val=data["val"])), Ranks())


@pytest.mark.parametrize("labels", ["cls", "json"])
def test_shards_hold_the_same_as_their_files(tmp_path: Path, labels: str, cache: Path) -> None:
    shard(tmp_path / "shards" / "a-0.tar", 5, labels=labels)
    shard(tmp_path / "shards" / "a-1.tar", 5, first=5, labels=labels)
    listing, held_out = listed(tmp_path / "shards", cache, "shards")
    assert held_out is None
    assert len(listing) == 10
    assert [listing.read(index) for index in range(10)] == [(picture(n), n % 3) for n in range(10)]
    assert listing.where(7).endswith("a-1.tar: n/0007.jpg")
    assert listing.classes == 3


def test_shards_are_read_through_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shard(tmp_path / "one.tar")
    first, _ = listed(path, cache, "one.tar")
    opened = list[Any]()
    real = tarfile.open

    def noted(*where: Any, **how: Any) -> Any:
        opened.append(where)
        return real(*where, **how)

    monkeypatch.setattr(tarfile, "open", noted)
    again, _ = listed(path, cache, "one.tar")
    assert (opened, again.sha256) == ([], first.sha256)
    shard(path, 11)
    changed, _ = listed(path, cache, "one.tar")
    assert len(changed) == 11
    assert changed.sha256 != first.sha256


def batches(source: Any, workers: int, rank: int = 0, world: int = 1, start: int = 1) -> list[Any]:
    batch_loader = BatchLoader(source, share(4, rank, world), CPU, Loader(workers=workers))
    try:
        return [batch_loader.train(step) for step in range(start, 8)] + [batch_loader.held_out(0, 1)]
    finally:
        batch_loader.close()


def test_images_are_the_same_whatever_the_processes_the_ranks_and_the_start(tmp_path: Path) -> None:
    source = open_data(config(shard(tmp_path / "one.tar", 12), 3), Ranks())
    none, one, three = (batches(source, workers) for workers in (0, 1, 3))
    halves = [batches(source, rank, rank, 2) for rank in (0, 1)]
    resumed = batches(source, 1, start=4)  # in the middle of an epoch of 11
    for at, (images, labels) in enumerate(none):
        for other in (one[at], three[at], *([resumed[at - 3]] if at >= 3 else [])):
            assert torch.equal(images, other[0])
            assert torch.equal(labels, other[1])
        assert torch.equal(images, torch.cat([half[at][0] for half in halves]))
    assert not torch.equal(none[0][0], none[1][0])


def test_an_image_is_changed_anew_in_each_epoch(tmp_path: Path, cache: Path) -> None:
    listing, _ = listed(folders(tmp_path / "images"), cache, "images")
    pictures = Pictures(listing, 32, 7, changes=True)
    assert np.array_equal(pictures.item(3, 0)[0], pictures.item(3, 0)[0])
    assert not np.array_equal(pictures.item(3, 0)[0], pictures.item(3, 1)[0])
    other = Pictures(listing, 32, 8, changes=True)
    assert not np.array_equal(pictures.item(3, 0)[0], other.item(3, 0)[0])
    still = Pictures(listing, 32, 7, changes=False)
    assert np.array_equal(still.item(3, 0)[0], still.item(3, 1)[0])


def test_a_list_travels_by_its_path(tmp_path: Path, cache: Path) -> None:
    listing, _ = listed(folders(tmp_path / "images", count=200), cache, "images")
    _ = len(listing)
    sent = pickle.dumps(listing)
    assert len(sent) < 1000
    assert pickle.loads(sent).where(250) == listing.where(250)


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(0, 1000))
def test_a_cut_lies_within_its_image(width: int, height: int, seed: int) -> None:
    box = random_crop(width, height, generator(seed, 0, 0, 0))
    assert min(box.left, box.top) >= 0
    assert box.left + box.width <= width
    assert box.top + box.height <= height
    assert min(box.width, box.height) > 0


def test_a_large_jpeg_is_decoded_small_and_looks_the_same() -> None:
    gradient = np.linspace(0, 255, 1024)[None, :, None] * np.ones((768, 1, 3))
    jpeg, png = io.BytesIO(), io.BytesIO()
    Image.fromarray(gradient.astype(np.uint8)).save(jpeg, "jpeg", quality=95)
    Image.fromarray(gradient.astype(np.uint8)).save(png, "png")
    small, whole = (decoded(one.getvalue(), 64, None).astype(int) for one in (jpeg, png))
    assert small.shape == (64, 64, 3)
    assert np.abs(small - whole).max() <= 4


def test_colours_of_every_kind_become_three() -> None:
    for mode in ("L", "RGBA", "P", "CMYK", "1"):
        buffer = io.BytesIO()
        Image.new(mode, (50, 40)).save(buffer, "tiff" if mode == "CMYK" else "png")
        assert decoded(buffer.getvalue(), 16, None).shape == (16, 16, 3)


def test_images_that_can_not_be_read_are_named(tmp_path: Path) -> None:
    root = folders(tmp_path / "images")
    for path in (root / "dog").iterdir():
        path.write_bytes(path.read_bytes()[:200])
    source = open_data(config(root), Ranks())
    with pytest.raises(UsageError, match=r"images/dog/\d\.\w+ is not a readable image: "):
        [source.train(step, slice(0, 4)) for step in range(1, 6)]


def broken(tmp_path: Path, what: str) -> Path:
    root = tmp_path / "images"
    if what == "class without images":
        folders(root)
        (root / "empty").mkdir()
    elif what == "other classes":
        folders(root / "train")
        folders(root / "val", ("cat", "cow"))
    elif what == "packed":
        root.mkdir()
        with tarfile.open(root / "a.tar", "w:gz") as tar:
            tar.add(__file__, "a.py")
    elif what == "no images":
        packed(root / "a.tar", {"a.py": b""})
    else:
        packed(root / "a.tar", {"1.jpg": picture(1), "1.cls": b"cat"})
    return root


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("nothing", None),
        ("class without images", "empty is a class without images"),
        ("other classes", "the class cow is in only one of .*train and .*val"),
        ("packed", "can't be read as an unpacked tar file"),
        ("no images", "holds no images"),
        ("words", "a.tar: 1.cls is not a class number: b'cat'"),
    ],
)
def test_images_that_can_not_be_used_are_refused(tmp_path: Path, what: str, words: str | None) -> None:
    path = tmp_path / "none" if words is None else broken(tmp_path, what)
    with pytest.raises(UsageError, match=words or "does not exist on this machine"):
        open_data(config(path), Ranks())


def test_what_holds_images_is_told_from_text(tmp_path: Path) -> None:
    assert holds_images(folders(tmp_path / "a"))
    folders(tmp_path / "b" / "train")
    assert holds_images(tmp_path / "b")
    assert holds_images(shard(tmp_path / "c" / "one.tar").parent)
    assert not holds_images(Path(__file__).parent)
    assert not holds_images(tmp_path / "none")


def test_a_model_of_others_takes_images_of_the_size_that_the_spec_says(tmp_path: Path) -> None:
    data = {"path": str(folders(tmp_path / "images")), "image_size": 40}
    source = open_data(parse({"model": "hf:vit", "data": data}), Ranks())
    assert source.finish(source.train(1, slice(0, 4)))[0].shape == (4, 3, 40, 40)


def test_a_key_ends_at_the_first_dot_of_a_file(tmp_path: Path) -> None:
    (row,) = scanned(packed(tmp_path / "a.tar", {"d.x/1.seg.png": picture(1, "png"), "d.x/1.cls": b"4"}), 3)
    assert (row.name, row.shard, row.label) == ("d.x/1.seg.png", 3, 4)


def test_a_part_can_be_held_out_of_two_images_but_not_of_one(tmp_path: Path) -> None:
    two = parse({"model": "my:model", "data": str(folders(tmp_path / "two", ("a",), 2)), "batch_size": 1})
    assert open_data(two, Ranks()).facts["data_held_out_samples"] == 1
    with pytest.raises(UsageError, match="has one image; at least two"):
        open_data(two._replace(data=two.data._replace(path=str(folders(tmp_path / "one", ("a",), 1)))), Ranks())


def test_a_label_that_only_the_held_out_shards_have_counts(tmp_path: Path) -> None:
    shard(tmp_path / "train" / "a.tar", 2)
    shard(tmp_path / "val" / "a.tar", 3)
    with pytest.raises(UsageError, match="has 3 classes, and the model 2"):
        open_data(config(tmp_path), Ranks())
    for classes in (3, 10):
        source = open_data(config(tmp_path, classes), Ranks())
        assert (source.num_classes, source.image_size) == (3, 32)


def test_what_normalises_is_brought_to_the_device_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_data(config(folders(tmp_path / "images")), Ranks())
    batch = source.train(1, slice(0, 2))
    first = source.finish(batch)[0]
    monkeypatch.setattr(torch, "tensor", None)
    assert torch.equal(source.finish(batch)[0], first)


def test_the_task_decides_what_a_model_of_transformers_is_shown(tmp_path: Path) -> None:
    images = str(folders(tmp_path / "images", ("a", "b")))
    (tmp_path / "images" / "a" / "notes.txt").unlink()
    tokens = {"model": {"name": "hf:llama", "task": "causal-lm"}, "data": {"path": images, "block_size": 8}}
    with pytest.raises(UsageError, match="holds no text files"):
        open_data(parse(tokens), Ranks())
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("to be or not to be")
    seeing = {"model": {"name": "hf:vit", "task": "image-classification"}, "data": str(tmp_path / "text")}
    with pytest.raises(UsageError, match="holds neither folders of images"):
        open_data(parse(seeing), Ranks())
    small = {"name": "hf:vit", "task": "image-classification", "image_size": 16}
    source = open_data(parse({"model": small, "data": images}), Ranks())
    assert source.finish(source.train(1, slice(0, 2)))[0].shape == (2, 3, 16, 16)
