"""Ways in which the folder of a model may be broken, foreign or hostile: functions that damage a folder."""

import json
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"
UP = "model.layers.1.mlp.up_proj.weight"


@dataclass
class RunsCode:
    """An object whose pickle makes a file when it is read without care."""

    path: str

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def tensors(change):
    """Change the tensors of a folder: `change` takes them by name and changes them or returns others."""

    def damage(folder):
        held = load_file(folder / WEIGHTS)
        held = change(held) or held
        save_file(held, folder / WEIGHTS, metadata={"format": "pt"})

    return damage


def without(*names):
    return tensors(lambda held: {name: one for name, one in held.items() if name not in names})


def also(**others):
    """Add tensors; in their names, a double underscore stands for a point."""
    return tensors(lambda held: held | {name.replace("__", "."): one.clone() for name, one in others.items()})


def as_type(dtype, name=UP):
    return tensors(lambda held: held | {name: held[name].to(dtype)})


def number(value, name=UP):
    def change(held):
        held[name].view(-1)[5] = value

    return tensors(change)


def config(**fields):
    """Set fields of config.json; those set to `...` are left out."""

    def damage(folder):
        held = json.loads((folder / "config.json").read_text()) | fields
        held = {name: value for name, value in held.items() if value is not ...}
        (folder / "config.json").write_text(json.dumps(held))

    return damage


def text(file, content):
    """Write a file, and nothing else."""

    def damage(folder):
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return damage


def gone(*files):
    def damage(folder):
        for file in files:
            (folder / file).unlink()

    return damage


def cut(file, size):
    def damage(folder):
        content = (folder / file).read_bytes()
        (folder / file).write_bytes(content[:size] if size >= 0 else content[: len(content) + size])

    return damage


def header(change):
    """Change the header of the weights: `change` takes it as a dictionary, and returns one or the bytes of one."""

    def damage(folder):
        content = (folder / WEIGHTS).read_bytes()
        size = int.from_bytes(content[:8], "little")
        changed = change(json.loads(content[8 : 8 + size]))
        written = changed if isinstance(changed, bytes) else json.dumps(changed).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(written)) + written + content[8 + size :])

    return damage


def entry(name=UP, **fields):
    return header(lambda held: held | {name: held[name] | fields})


def header_size(size):
    def damage(folder):
        content = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", size) + content[8:])

    return damage


def twice(held):
    """A header that holds the same name two times."""
    written = json.dumps(held)
    return (written[:-1] + ", " + json.dumps({UP: held[UP]})[1:]).encode()


def sharded(change=None):
    """Store the weights in two files with an index, which `change` changes."""

    def damage(folder):
        held = load_file(folder / WEIGHTS)
        names = sorted(held)
        files = {
            name: f"model-0000{1 + (2 * place // len(names))}-of-00002.safetensors" for place, name in enumerate(names)
        }
        for file in {*files.values()}:
            save_file(
                {name: held[name] for name in names if files[name] == file}, folder / file, metadata={"format": "pt"}
            )
        (folder / WEIGHTS).unlink()
        index = {"metadata": {}, "weight_map": files}
        changed = index if change is None else change(index)
        written = changed if isinstance(changed, str) else json.dumps(changed)
        (folder / f"{WEIGHTS}.index.json").write_text(written)

    return damage


def shard_at(path):
    """An index that says that its first file is elsewhere."""
    return sharded(lambda index: index | {"weight_map": index["weight_map"] | {UP: path}})


def in_both_shards(folder):
    sharded()(folder)
    first, second = sorted(folder.glob("model-*.safetensors"))
    held = load_file(first)
    save_file(held | load_file(second), second, metadata={"format": "pt"})


def pickled(change=None):
    """Store the weights in torch's own format, as `change` makes them of the tensors."""

    def damage(folder):
        held = load_file(folder / WEIGHTS)
        torch.save(held if change is None else change(held), folder / "pytorch_model.bin")
        (folder / WEIGHTS).unlink()

    return damage


def runs_code(folder):
    pickled(lambda held: held | {"x": RunsCode(str(folder / "was_run"))})(folder)


def all_of(*damages):
    def damage(folder):
        for one in damages:
            one(folder)

    return damage


def copied(source, to):
    """A copy of a folder."""
    shutil.copytree(source, to)
    return to
